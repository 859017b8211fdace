"""The sender's rooms: open, awaited by a receiver, or closed and not to be opened again."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec

from pdctl.errors import HandoffError, TicketRejected
from pdctl.handoff.outbound import Outbound

if TYPE_CHECKING:
    from pdctl.handoff.serving import Serving

MAX_CLOSED = 65536


class Closed(msgspec.Struct, frozen=True):
    """A room that is over. `error` is what the leg that comes later is told; `claimed` says
    that a receiver has used the ticket, `admitted` that the prompt was here."""

    expires_at_s: float
    error: HandoffError | None
    claimed: bool
    admitted: bool


class Rooms:
    """Thread-safe. Lock order: this lock, then an Outbound's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Outbound] = {}
        self._awaited: dict[int, Serving] = {}
        self._closed: dict[int, Closed] = {}

    def open(self) -> list[Outbound]:
        with self._lock:
            return list(self._open.values())

    def admit(self, outbound: Outbound, now_s: float) -> None:
        """Opens a room, with the receiver that waits for it.

        Raises:
            HandoffError: the room's own, where it is closed: it is not re-created (R16).
        """
        room = outbound.room
        with self._lock:
            self._refuse_closed(room, now_s, admitting=True)
            if room in self._open:
                raise TicketRejected(f"room {room}: the ticket was used before")
            waiting = self._awaited.get(room)
            outbound.admit(waiting, "" if waiting is None else waiting.decode)
            self._open[room] = outbound
            self._awaited.pop(room, None)

    def claim(self, room: int, serving: Serving, now_s: float) -> None:
        """Gives the room to a receiver, now or when its prompt arrives.

        Raises:
            TicketRejected: the ticket was used before.
            HandoffError: the room's own, where the prompt failed before the receiver came.
        """
        with self._lock:
            self._refuse_closed(room, now_s, admitting=False)
            outbound = self._open.get(room)
            if outbound is not None:
                outbound.attach(serving, serving.decode)
            elif room in self._awaited:
                raise TicketRejected(f"room {room}: the ticket was used before")
            else:
                self._awaited[room] = serving

    def leave(self, room: int, serving: Serving, error: HandoffError, expires_at_s: float) -> bool:
        """The receiver went away; True where its prompt had not arrived: it never will be
        admitted then."""
        with self._lock:
            if self._awaited.get(room) is not serving:
                return False
            del self._awaited[room]
            self._remember(room, Closed(expires_at_s, _bare(error), claimed=True, admitted=False))
            return True

    def close(self, outbound: Outbound) -> None:
        """The room is over and its ticket spent."""
        with self._lock:
            if self._open.get(outbound.room) is outbound:
                del self._open[outbound.room]
            expiry = outbound.prompt.ticket_expires_at_s
            claimed = outbound.peer is not None
            error = None if outbound.error is None else _bare(outbound.error)
            self._remember(outbound.room, Closed(expiry, error, claimed, admitted=True))

    def _refuse_closed(self, room: int, now_s: float, *, admitting: bool) -> None:
        closed = self._closed.get(room)
        if closed is None or closed.expires_at_s <= now_s:
            return
        first_time = not (closed.admitted if admitting else closed.claimed)
        if first_time and closed.error is not None:
            raise _bare(closed.error)
        raise TicketRejected(f"room {room}: the ticket was used before")

    def _remember(self, room: int, closed: Closed) -> None:
        self._closed.pop(room, None)
        while len(self._closed) >= MAX_CLOSED:
            self._closed.pop(next(iter(self._closed)))
        self._closed[room] = closed


def _bare(error: HandoffError) -> HandoffError:
    """The same error without its traceback, whose frames would keep pages alive."""
    return type(error)(error.message, hint=error.hint)
