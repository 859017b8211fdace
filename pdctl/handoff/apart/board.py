"""Counters that are counted in another process."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pdctl.handoff.apart.calls import Call, Counted, FailureCounted, Gauged, Met, Observed, Rooms
from pdctl.handoff.counters import CounterBoard
from pdctl.trace import monotonic_s

ROOMS_S = 0.5
"""Between looks at the open handoffs."""


class DistantBoard(CounterBoard):
    """The data plane's: tells instead of counting."""

    def __init__(self, tell: Callable[[Call], None]) -> None:
        super().__init__()
        self._tell = tell
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="pdctl-rooms", daemon=True)
        self._thread.start()

    def add(self, *, peer: str | None = None, **amounts: int) -> None:
        self._tell(Counted(peer, amounts))

    def failure(self, cause: str) -> None:
        self._tell(FailureCounted(cause))

    def gauge(self, **values: int) -> None:
        self._tell(Gauged(values))

    def observe(self, phase: str, seconds: float, peer: str) -> None:
        self._tell(Observed(phase, seconds, peer))

    def met(self, peer: str, round_trip_s: float) -> None:
        self._tell(Met(peer, round_trip_s))

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _look(self) -> None:
        told = False
        while not self._stopped.wait(ROOMS_S):
            rooms = self.read().rooms
            if rooms or told:
                self._tell(Rooms(rooms))
            told = bool(rooms)


class Mirror:
    """The engine's: counts what it is told on the replica's own board."""

    def __init__(self, board: CounterBoard) -> None:
        self._board = board
        self._rooms: dict[int, float] = {}
        self._at_s = 0.0
        board.watch(self._idle_rooms)

    def told(self, call: Call) -> None:
        """Nothing where the call is none of a board's."""
        if isinstance(call, Counted):
            self._board.add(peer=call.peer, **call.amounts)
        elif isinstance(call, FailureCounted):
            self._board.failure(call.cause)
        elif isinstance(call, Gauged):
            self._board.gauge(**call.values)
        elif isinstance(call, Observed):
            self._board.observe(call.phase, call.seconds, call.peer)
        elif isinstance(call, Met):
            self._board.met(call.peer, call.round_trip_s)
        elif isinstance(call, Rooms):
            self._rooms, self._at_s = call.idle_s, monotonic_s()

    def lost(self, failed: int, cause: str) -> None:
        """The data plane has ended: nothing is active there any more."""
        self._rooms = {}
        for _ in range(failed):
            self._board.failure(cause)
        for peer, pair in self._board.read().pairs.items():
            self._board.add(peer=peer, handoffs_active=-pair.handoffs_active)
        self._board.add(handoffs_failed=failed)
        self._board.gauge(buffer_bytes_used=0, waiters=0)

    def _idle_rooms(self) -> dict[int, float]:
        since_s = monotonic_s() - self._at_s
        return {room: idle_s + since_s for room, idle_s in self._rooms.items()}
