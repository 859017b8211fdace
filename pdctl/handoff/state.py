"""Both ends' transitions, as tables. Everything that affects a handoff's state is here.

A (state, event) pair that is not in a table is an error: LocalProtocolError where this end
caused the event, which is a bug in pdctl; ProtocolViolation where the peer did. The sessions
keep no other state of their own; `diagram.py` draws docs/handoff-states.md from the tables.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

from pdctl.errors import ProtocolViolation


class LocalProtocolError(RuntimeError):
    """This end did something out of order: a bug, never the peer's doing."""


class Sending(enum.Enum):
    """States of a room on the sender."""

    NEW = "new"
    AWAITED = "awaited"
    """A receiver said Hello; the prompt has not arrived yet."""
    QUEUED = "queued"
    """The prompt waits for pages; no receiver yet."""
    CLAIMED = "claimed"
    """The prompt waits for pages, the receiver for an Offer."""
    RESERVED = "reserved"
    """Pages are reserved; no receiver yet."""
    READY = "ready"
    """Pages are reserved and the receiver is there."""
    OFFERED = "offered"
    GRANTED = "granted"
    ENDED = "ended"
    DONE = "done"
    FAILED = "failed"


class Receiving(enum.Enum):
    """States of a handoff on the receiver."""

    NEW = "new"
    GREETED = "greeted"
    OFFERED = "offered"
    """The engine is allocating."""
    GRANTED = "granted"
    LANDED = "landed"
    """Every page and End are here."""
    COMMITTING = "committing"
    DONE = "done"
    FAILED = "failed"


class Event(enum.Enum):
    """What happens to a handoff; each end has its own half of these as `LOCAL_*`."""

    ADMIT = "admit"
    RESERVE = "reserve"
    HELLO = "Hello"
    OFFER = "Offer"
    GRANT = "Grant"
    PAGES = "Pages"
    """Or Placed, where the receiver reads the piece itself."""
    TAKEN = "Taken"
    END = "End"
    COMMIT = "commit"
    DONE = "Done"
    RENEW = "Renew"
    ABORT = "Abort"
    FAIL = "fail"


State = TypeVar("State", bound=enum.Enum)

SENDER_LOCAL = frozenset(
    {Event.ADMIT, Event.RESERVE, Event.OFFER, Event.PAGES, Event.END, Event.FAIL}
)
RECEIVER_LOCAL = frozenset(
    {Event.HELLO, Event.GRANT, Event.TAKEN, Event.COMMIT, Event.DONE, Event.FAIL}
)

SENDER_FINAL = frozenset({Sending.DONE, Sending.FAILED})
RECEIVER_FINAL = frozenset({Receiving.DONE, Receiving.FAILED})

_WITH_RECEIVER = (
    Sending.AWAITED,
    Sending.CLAIMED,
    Sending.READY,
    Sending.OFFERED,
    Sending.GRANTED,
    Sending.ENDED,
)
_WITH_SENDER = (Receiving.GREETED, Receiving.OFFERED, Receiving.GRANTED, Receiving.LANDED)

SENDER: dict[tuple[Sending, Event], Sending] = {
    (Sending.NEW, Event.ADMIT): Sending.QUEUED,
    (Sending.NEW, Event.HELLO): Sending.AWAITED,
    (Sending.AWAITED, Event.ADMIT): Sending.CLAIMED,
    (Sending.QUEUED, Event.RESERVE): Sending.RESERVED,
    (Sending.QUEUED, Event.HELLO): Sending.CLAIMED,
    (Sending.CLAIMED, Event.RESERVE): Sending.READY,
    (Sending.RESERVED, Event.HELLO): Sending.READY,
    (Sending.READY, Event.OFFER): Sending.OFFERED,
    (Sending.OFFERED, Event.GRANT): Sending.GRANTED,
    (Sending.GRANTED, Event.PAGES): Sending.GRANTED,
    (Sending.GRANTED, Event.TAKEN): Sending.GRANTED,
    (Sending.GRANTED, Event.END): Sending.ENDED,
    (Sending.ENDED, Event.DONE): Sending.DONE,
    **{(state, Event.RENEW): state for state in _WITH_RECEIVER},
    **{(state, Event.ABORT): Sending.FAILED for state in _WITH_RECEIVER},
    **{(state, Event.FAIL): Sending.FAILED for state in Sending if state not in SENDER_FINAL},
}

RECEIVER: dict[tuple[Receiving, Event], Receiving] = {
    (Receiving.NEW, Event.HELLO): Receiving.GREETED,
    (Receiving.GREETED, Event.OFFER): Receiving.OFFERED,
    (Receiving.OFFERED, Event.GRANT): Receiving.GRANTED,
    (Receiving.GRANTED, Event.PAGES): Receiving.GRANTED,
    (Receiving.GRANTED, Event.TAKEN): Receiving.GRANTED,
    (Receiving.GRANTED, Event.END): Receiving.LANDED,
    (Receiving.LANDED, Event.COMMIT): Receiving.COMMITTING,
    (Receiving.COMMITTING, Event.DONE): Receiving.DONE,
    **{(state, Event.RENEW): state for state in _WITH_SENDER},
    **{(state, Event.ABORT): Receiving.FAILED for state in _WITH_SENDER},
    **{(state, Event.FAIL): Receiving.FAILED for state in Receiving if state not in RECEIVER_FINAL},
}


class Machine(Generic[State]):
    """One handoff's state. Not thread-safe: its owner's lock guards it."""

    def __init__(
        self, table: Mapping[tuple[State, Event], State], local: frozenset[Event], start: State
    ) -> None:
        self._table = table
        self._local = local
        self.state = start

    def on(self, event: Event) -> State:
        """Moves on, or raises and stays where it is."""
        after = self._table.get((self.state, event))
        if after is None:
            what = f"{event.value} while {self.state.value}"
            if event in self._local:
                raise LocalProtocolError(what)
            raise ProtocolViolation(f"the peer sent {what}")
        self.state = after
        return after


def sending(start: Sending = Sending.NEW) -> Machine[Sending]:
    return Machine(SENDER, SENDER_LOCAL, start)


def receiving(start: Receiving = Receiving.NEW) -> Machine[Receiving]:
    return Machine(RECEIVER, RECEIVER_LOCAL, start)
