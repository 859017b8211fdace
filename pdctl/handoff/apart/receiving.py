"""A `Receiver` in the data plane's process, for the engine: the same interface."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Unpack

from pdctl.errors import HandoffCancelled, HandoffError
from pdctl.handoff.apart.calls import (
    Abort,
    Call,
    Commit,
    Ended,
    Fail,
    Fetch,
    Offered,
    Piece,
    Refused,
    SentLeg,
    Settled,
    Taken,
    Trouble,
    Wanted,
)
from pdctl.handoff.apart.locking import LockedAsUsed
from pdctl.handoff.apart.plane import ApartCommon, Plane
from pdctl.handoff.apart.shared import SharedMemory
from pdctl.handoff.identity import Leg, Tokens
from pdctl.handoff.lease import checked_timeout
from pdctl.handoff.opening import Opening
from pdctl.handoff.page import PATTERN, Patterns
from pdctl.handoff.pulse import guarded
from pdctl.handoff.sink import HELD_PIECES, PageSink

log = logging.getLogger("pdctl.handoff")

RECEIVED_BYTES = 1 << 30
"""Address space for pieces on their way; connections take what they use of it, 8 MiB each."""
TAKEN_AT_ONCE = 4


class ApartReceiver:
    """As `receiver.Receiver`. One thread per handoff calls its sink.

    Args:
        common: an engine with a `lock` reads `HELD_PIECES` pieces after `PageSink.write` has
            returned.
    """

    def __init__(
        self,
        opening: Opening,
        **common: Unpack[ApartCommon],
    ) -> None:
        memory = SharedMemory.make(RECEIVED_BYTES)
        lock = common["lock"]
        self._locked = LockedAsUsed(memory, lock)
        self._geometry = opening.geometry
        self._held_pieces = 0 if lock is None else HELD_PIECES
        self._on_failed = common["on_failed"]
        self._guard = threading.Lock()
        self._open: dict[int, ApartInbound] = {}
        self._number = 0
        self._plane = Plane(
            opening,
            memory,
            heard=self._heard,
            lost=self._lost,
            **common,
        )

    @property
    def pid(self) -> int:
        """Of the data plane's process."""
        return self._plane.pid

    def start(self) -> None:
        """Raises PeerLost where the data plane's process did not start."""
        self._plane.wait_open()

    def fetch(self, leg: Leg, token_ids: Sequence[int], sink: PageSink) -> ApartInbound:
        """Raises HandoffExpired for the leg's time, HandoffError for the tokens, or where the
        data plane is gone."""
        checked_timeout(leg.timeout_s)
        tokens = Tokens.of(token_ids)
        with self._guard:
            if self._plane.error is not None:
                raise HandoffCancelled("the receiver is closed")
            self._number += 1
            inbound = ApartInbound(self, self._number, leg, sink, self._held_pieces)
            self._open[inbound.number] = inbound
        self._plane.say(Fetch(inbound.number, SentLeg.of(leg), tokens))
        return inbound

    def close(self) -> None:
        self._plane.close()
        self._locked.close()

    def say(self, call: Call) -> None:
        self._plane.say(call)

    def piece(self, call: Piece) -> Patterns:
        """Where it lies."""
        geometry = self._geometry
        size = call.layers * geometry.layer_bytes
        self._locked.use(call.offset, size)
        run = self._plane.memory.run(call.offset, size)
        return run.view(PATTERN).reshape(call.layers, *geometry.shape[1:])

    # -- the hearing thread

    def _heard(self, call: Call) -> None:
        if isinstance(call, Piece):
            # much more often than all others
            if (inbound := self._open.get(call.number)) is not None:
                inbound.told(call)
        elif isinstance(call, Offered | Commit | Abort | Settled):
            with self._guard:
                inbound = self._open.get(call.number)
                if isinstance(call, Settled):
                    self._open.pop(call.number, None)
            if inbound is not None:
                inbound.told(call)

    def _lost(self, error: HandoffError) -> int:
        with self._guard:
            left = list(self._open.values())
            self._open.clear()
        trouble = Trouble.of(error)
        for inbound in left:
            guarded(partial(self._on_failed, inbound.room, error.cause, error.message))
            inbound.lose()
            inbound.told(Abort(inbound.number, trouble))
            inbound.told(Settled(inbound.number, done=False, trouble=trouble))
        return len(left)


class ApartInbound:
    """As `inbound.Inbound` for the engine: calls the sink as the data plane says, in order."""

    def __init__(
        self, receiver: ApartReceiver, number: int, leg: Leg, sink: PageSink, held_pieces: int
    ) -> None:
        self.number = number
        self.room = leg.room
        self.error: HandoffError | None = None
        self.settled = threading.Event()
        self._receiver = receiver
        self._decode = leg.decode
        self._sink = sink
        self._held_pieces = held_pieces
        self._written = self._freed = 0
        """Pieces; the difference is not to be overwritten yet."""
        self._refused = self._over = False
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        name = f"pdctl-land-{leg.room:x}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        self._receiver.say(Fail(self.number, None))

    def lose(self) -> None:
        """The data plane is gone: what has come and was not written is worth nothing."""
        self._refused = True

    def told(self, call: Call) -> None:
        self._calls.put(call)

    def _run(self) -> None:
        """Until Settled, which comes at the latest when the data plane is lost."""
        while not isinstance(call := self._calls.get(), Settled):
            if isinstance(call, Piece):
                self._write(call)
            elif isinstance(call, Abort):
                self._abort(call)
            elif not (self._refused or self._over) and isinstance(call, Offered | Commit):
                self._attempt(partial(self._ask, call))
        self.error = None if call.trouble is None else call.trouble.error()
        self.settled.set()

    def _ask(self, call: Offered | Commit) -> None:
        if isinstance(call, Commit):
            self._sink.commit(call.first_token)
            self._over = True
            self._receiver.say(Ended(self.number))
            return
        want = self._sink.offered(call.tokens, call.deadline)
        wanted = Wanted(self.number, want.tokens, want.held_tokens, want.first_token)
        self._receiver.say(wanted)

    def _write(self, call: Piece) -> None:
        if not (self._refused or self._over):
            piece = self._receiver.piece(call)
            self._attempt(lambda: self._sink.write(call.page, call.first_layer, piece))
        self._written += 1
        free = self._written - self._freed - self._held_pieces
        if free >= TAKEN_AT_ONCE or (free > 0 and self._calls.empty()):
            self._freed += free
            self._receiver.say(Taken(self.number, free))

    def _abort(self, call: Abort) -> None:
        if not self._over:
            self._over = True
            error = call.trouble.error()
            guarded(lambda: self._sink.abort(error))
        self._receiver.say(Ended(self.number))

    def _attempt(self, ask: Callable[[], None]) -> None:
        """What the sink raises ends this handoff alone (R34)."""
        try:
            ask()
        except HandoffError as error:
            self._refuse(error)
        except Exception as error:
            log.exception("room=%s the decode engine failed", self.room)
            self._refuse(HandoffError(f"the decode engine {self._decode} failed: {error!r}"))

    def _refuse(self, error: HandoffError) -> None:
        self._refused = True
        self._receiver.say(Refused(self.number, Trouble.of(error)))
