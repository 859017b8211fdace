"""A store's memory at a replica, made ready to be copied from before pages are there.

A page that a process has not touched before takes as long to map as to copy, and memory that a GPU
is to read where it lies has to be locked, a millisecond for each few MiB, while the engine's own
calls of the driver wait. So a thread of its own does it, while nothing is asked of the store; what
is not ready in time is copied all the same.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable

from pdctl.handoff.arena import Bytes
from pdctl.handoff.store.memory import PageMemory
from pdctl.trace import monotonic_s

log = logging.getLogger("pdctl.store")

CELL_BYTES = 4 << 20
"""Prepared at a time."""
QUIET_S = 0.1
"""For so long nothing was asked before a cell is prepared."""
PATIENCE_S = 0.25
"""One is prepared after so long in any case."""
CLOSE_S = 1.0


class Preparing:
    """Of slots from the first on, up to the last that has memory; thread-safe.

    Args:
        lock: for as long as that array lives; raises MemoryError. None: memory is mapped.
    """

    def __init__(self, memory: PageMemory, lock: Callable[[Bytes], None] | None) -> None:
        self._memory = memory
        # of a page of the system's that two cells share, no part can be locked twice
        whole = memory.page_bytes % mmap.PAGESIZE == 0
        self._prepare = lock if lock is not None and whole else touch
        self._cell = max(1, CELL_BYTES // memory.page_bytes)
        self._ready: list[Bytes] = []
        self._changed = threading.Condition()
        self._stop = self._wanted = 0
        self._used_at = 0.0
        self._over = False
        self._thread = threading.Thread(target=self._run, name="pdctl-store-memory", daemon=True)
        self._thread.start()

    def backed(self, slots: int) -> None:
        """The store was asked, and so many of its slots have memory."""
        with self._changed:
            self._used_at = monotonic_s()
            if slots > self._wanted:
                self._wanted = slots
                self._changed.notify_all()

    def close(self) -> None:
        """Bounded. What is locked stays so as long as this lives."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while self._waited():
            stop = min(self._stop + self._cell, self._wanted)
            cell = self._memory.run(self._stop, stop)
            try:
                self._prepare(cell)
            except MemoryError as error:
                log.warning("pages of the store from %d on are copied twice: %s", self._stop, error)
                return
            # whatever a driver raises: pages are copied without it
            except Exception:
                log.exception("the store's memory can't be locked")
                return
            self._ready.append(cell)
            self._stop = stop

    def _waited(self) -> bool:
        """Until there is something to prepare, and quiet; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._wanted > self._stop)
            until_s = monotonic_s() + PATIENCE_S
            while not self._over:
                now_s = monotonic_s()
                left_s = min(until_s, self._used_at + QUIET_S) - now_s
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            return not self._over


def touch(memory: Bytes) -> None:
    """Maps it."""
    memory[:: mmap.PAGESIZE].max()
