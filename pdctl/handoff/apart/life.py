"""Whether the engine's process still does anything, asked while it has handoffs open."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from pdctl.errors import HandoffError, PeerLost
from pdctl.handoff.apart.calls import Call, Ping
from pdctl.handoff.lease import DEAD_S
from pdctl.trace import monotonic_s

ASK_S = 0.5


class Busy(Protocol):
    """The end that is asked for."""

    @property
    def busy(self) -> bool:
        """Whether it has open handoffs."""
        ...

    def lose(self, error: HandoffError) -> None:
        """Ends them. Never blocks."""
        ...


class EngineLife:
    """Without this a data plane would keep up the leases of an engine that is frozen: the peer
    has to notice that as it does where both are one process (`lease.DEAD_S`)."""

    def __init__(self, replica: str, end: Busy, tell: Callable[[Call], None]) -> None:
        self._replica = replica
        self._end = end
        self._tell = tell
        self._asked_at: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pdctl-life", daemon=True)
        self._thread.start()

    def heard(self) -> None:
        """The engine's process has said anything."""
        self._asked_at = None

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(ASK_S):
            asked_at = self._asked_at
            if not self._end.busy:
                self._asked_at = None
            elif asked_at is None:
                self._asked_at = monotonic_s()
                self._tell(Ping())
            elif monotonic_s() - asked_at >= DEAD_S:
                self._asked_at = None
                self._end.lose(
                    PeerLost(f"the engine of {self._replica} was silent for {DEAD_S:g} s")
                )
