"""The data plane's side of a decode replica: a `Receiver` whose sinks are in another process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from pdctl.errors import HandoffError, HandoffExpired
from pdctl.handoff.apart.calls import (
    Abort,
    Call,
    Commit,
    Ended,
    Fail,
    Fetch,
    Offered,
    Order,
    Piece,
    Refused,
    Settled,
    Taken,
    Trouble,
    Wanted,
)
from pdctl.handoff.apart.shared import SharedMemory
from pdctl.handoff.arena import Bytes, arena_of
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.ending import OnFailed
from pdctl.handoff.inbound import Inbound
from pdctl.handoff.opening import Opening, open_receiver
from pdctl.handoff.page import Patterns
from pdctl.handoff.sink import HELD_PIECES, Want
from pdctl.trace import monotonic_s

PIECES = 2 * HELD_PIECES
"""Of one connection, at most, that the engine has not taken: it may read the last `HELD_PIECES`,
and what comes after them keeps the link busy while its interpreter does other things."""
LOOK_S = 0.25
ANSWER_S = 60.0
"""What the engine's `commit` or `abort` may take, and its answer to an offer past the deadline."""


class Receives:
    """`obey` is called by one thread, in the engine's order, and never blocks."""

    def __init__(
        self,
        opening: Opening,
        memory: SharedMemory,
        tell: Callable[[Call], None],
        board: CounterBoard,
        on_failed: OnFailed,
    ) -> None:
        self._memory = memory
        self._tell = tell
        self._lock = threading.Lock()
        self._arena = arena_of(memory.bytes)
        self._landings: dict[int, Landing] = {}
        self._receiver = open_receiver(
            opening,
            os.environ,
            board,
            on_failed,
            memory=self._taken_memory,
            held_pieces=PIECES,
        )

    def start(self) -> None:
        """It dials: nothing is to be begun."""

    def close(self) -> None:
        self._receiver.close()

    @property
    def busy(self) -> bool:
        return bool(self._landings)

    def lose(self, error: HandoffError) -> None:
        for landing in list(self._landings.values()):
            landing.lose(error)

    def obey(self, order: Order) -> None:
        if isinstance(order, Fetch):
            self._fetch(order)
        elif isinstance(order, Wanted | Taken | Refused | Ended | Fail):
            landing = self._landings.get(order.number)
            if landing is not None:
                landing.obey(order)

    def _fetch(self, order: Fetch) -> None:
        landing = Landing(order.number, self._memory, self._tell)
        self._landings[order.number] = landing
        try:
            landing.inbound = self._receiver.fetch(
                order.leg,
                order.tokens,
                landing,
                on_settled=lambda inbound: self._settled(order.number, inbound),
            )
        except HandoffError as error:
            self._landings.pop(order.number)
            trouble = Trouble.of(error)
            self._tell(Abort(order.number, trouble))
            self._tell(Settled(order.number, done=False, trouble=trouble, refused=True))

    def _settled(self, number: int, inbound: Inbound) -> None:
        self._landings.pop(number, None)
        error = inbound.error
        trouble = None if error is None else Trouble.of(error)
        self._tell(Settled(number, done=error is None, trouble=trouble))

    def _taken_memory(self, size: int) -> Bytes:
        with self._lock:
            found = self._arena.take(size)
        if found is None:
            raise HandoffError("too many handoffs are received at once: no memory for a piece")
        return found


class Landing:
    """A `PageSink` whose engine is in the other process."""

    def __init__(self, number: int, memory: SharedMemory, tell: Callable[[Call], None]) -> None:
        self.inbound: Inbound | None = None
        self._number = number
        self._memory = memory
        self._tell = tell
        self._changed = threading.Condition()
        self._want: Want | None = None
        self._refusal: HandoffError | None = None
        self._untaken = 0
        """Pieces that lie in the memory until the engine takes them."""
        self._ended = False

    def lose(self, error: HandoffError) -> None:
        """Any thread: the engine answers nothing any more."""
        with self._changed:
            self._refusal = error
            self._changed.notify_all()
        if self.inbound is not None:
            self.inbound.give_up(error)

    def obey(self, order: Wanted | Taken | Refused | Ended | Fail) -> None:
        if isinstance(order, Fail):
            if self.inbound is not None:
                self.inbound.cancel()
            return
        with self._changed:
            if isinstance(order, Wanted):
                self._want = Want(
                    tokens=order.tokens,
                    held_tokens=order.held_tokens,
                    first_token=order.first_token,
                )
            elif isinstance(order, Taken):
                self._untaken -= order.pieces
            elif isinstance(order, Refused):
                self._refusal = order.trouble.error()
            else:
                self._ended = True
            self._changed.notify_all()
        # not one of `commit`, which waits for it: that is past being given up
        if isinstance(order, Refused) and self.inbound is not None:
            self.inbound.give_up(order.trouble.error())

    # -- PageSink, on the handoff's threads

    def offered(self, tokens: int, deadline: float) -> Want:
        self._tell(Offered(self._number, tokens, deadline))
        self._wait(lambda: self._want is not None, deadline + ANSWER_S)
        if self._want is None:
            raise HandoffExpired("the decode engine did not answer before the deadline")
        return self._want

    def write(self, page: int, first_layer: int, piece: Patterns) -> None:
        """Returns once there is room for the next piece."""
        with self._changed:
            self._untaken += 1
        offset = self._memory.offset_of(piece)
        self._tell(Piece(self._number, page, first_layer, len(piece), offset))
        while not self._wait(lambda: self._untaken < PIECES, monotonic_s() + LOOK_S):
            if self.inbound is not None and self.inbound.error is not None:
                raise self.inbound.error

    def commit(self, first_token: int | None) -> None:
        self._tell(Commit(self._number, first_token))
        if not self._wait(lambda: self._ended, monotonic_s() + ANSWER_S):
            raise HandoffExpired(f"the decode engine did not commit within {ANSWER_S:g} s")

    def abort(self, error: HandoffError) -> None:
        """Waits where the engine may still read what has come: it is received into again."""
        self._tell(Abort(self._number, Trouble.of(error)))
        with self._changed:
            reads = self._untaken > 0
            self._refusal = None
        if reads:
            self._wait(lambda: self._ended, monotonic_s() + ANSWER_S)

    def _wait(self, reached: Callable[[], bool], until: float) -> bool:
        """False where it was not by then. Raises what the engine has raised."""
        with self._changed:
            while not reached():
                if self._refusal is not None:
                    raise self._refusal
                left = until - monotonic_s()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True
