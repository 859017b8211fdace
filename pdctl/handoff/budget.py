"""A byte budget that is reserved in order, without blocking anybody."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from pdctl.errors import BudgetExceeded, QueueFull
from pdctl.handoff.arena import Arena, Bytes
from pdctl.handoff.device import Run

log = logging.getLogger("pdctl.handoff")

MAX_WAITERS = 256


class Claim:
    """Bytes asked for: waiting, granted, or given back. Made by `Budget.claim`."""

    def __init__(self, budget: Budget, size: int, on_granted: Callable[[], None]) -> None:
        self._budget = budget
        self.size = size
        self.on_granted = on_granted
        self.granted = False
        self.released = False
        self.memory: Bytes | Run | None = None
        """Its bytes, where the budget has an arena; whoever takes them drops them here."""

    def start(self) -> None:
        """As `Budget.start`."""
        self._budget.start(self)

    def release(self) -> None:
        """Leaves the queue, or gives the bytes back; the second time it does nothing.

        Others that now fit are granted, in order, on the calling thread.
        """
        self._budget.release(self)


class Budget:
    """First come, first served; thread-safe; callbacks run without its lock.

    A wait has no deadline here: its owner's deadline releases the claim.

    Args:
        total: bytes.
        arena: makes the budget one of memory, too: a claim is granted with a run of it. An engine
            may hold that run longer than the claim: `look_again` from time to time.
        changed: told (bytes used, waiters) at every change, in order; it must not block nor
            call back.
    """

    def __init__(
        self,
        total: int,
        *,
        max_waiters: int = MAX_WAITERS,
        arena: Arena[Bytes] | Arena[Run] | None = None,
        changed: Callable[[int, int], None] = lambda used, waiters: None,
    ) -> None:
        self.total = total
        self._max_waiters = max_waiters
        self._arena = arena
        self._changed = changed
        self._lock = threading.Lock()
        self._used = 0
        self._waiting: deque[Claim] = deque()

    @property
    def used(self) -> int:
        return self._used

    @property
    def waiters(self) -> int:
        return len(self._waiting)

    def claim(self, size: int, on_granted: Callable[[], None]) -> Claim:
        """Bytes to ask for with `start`; until then it holds no place."""
        return Claim(self, size, on_granted)

    def start(self, claim: Claim) -> None:
        """Grants the claim at once where nobody waits and it fits, else queues it; does
        nothing for one that was released already.

        Raises:
            BudgetExceeded: more than the whole budget: it can never fit.
            QueueFull: too many wait already.
        """
        if claim.size > self.total:
            raise BudgetExceeded(
                f"{claim.size} bytes are more than the whole buffer of {self.total}"
            )
        with self._lock:
            if claim.released:
                return
            if len(self._waiting) >= self._max_waiters:
                raise QueueFull(f"{self._max_waiters} prompts wait for buffer bytes already")
            self._waiting.append(claim)
            granted = self._grant()
        self._tell(granted)

    def release(self, claim: Claim) -> None:
        with self._lock:
            if claim.released:
                return
            claim.released = True
            claim.memory = None
            if claim.granted:
                self._used -= claim.size
            elif claim in self._waiting:
                self._waiting.remove(claim)
            granted = self._grant()
        self._tell(granted)

    def look_again(self) -> None:
        """Grants what fits by now, as `release` does."""
        with self._lock:
            granted = self._grant() if self._waiting else []
        self._tell(granted)

    def _grant(self) -> list[Claim]:
        granted = []
        while self._waiting and self._fits(self._waiting[0]):
            claim = self._waiting.popleft()
            claim.granted = True
            self._used += claim.size
            granted.append(claim)
        self._changed(self._used, len(self._waiting))
        return granted

    def _fits(self, claim: Claim) -> bool:
        if self._used + claim.size > self.total:
            return False
        if self._arena is None:
            return True
        claim.memory = self._arena.take(claim.size)
        return claim.memory is not None

    def _tell(self, granted: list[Claim]) -> None:
        for claim in granted:
            try:
                claim.on_granted()
            # another request's callback must not break the one that released
            except Exception:
                log.exception("a reservation's callback failed")
