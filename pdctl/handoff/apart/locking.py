"""Memory of which only some is ever used, prepared for an engine's copies as that shows."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pdctl.handoff.apart.shared import SharedMemory
from pdctl.handoff.arena import Bytes

CELL_BYTES = 16 << 20
"""Prepared at a time: it takes milliseconds, and each place is used again and again."""


class LockedAsUsed:
    """Thread-safe."""

    def __init__(self, memory: SharedMemory, lock: Callable[[Bytes], None] | None) -> None:
        self._memory = memory
        self._lock = lock
        self._guard = threading.Lock()
        self._done: dict[int, Bytes] = {}

    def use(self, offset: int, size: int) -> None:
        """Raises what `lock` raises."""
        if self._lock is None:
            return
        cells = range(offset // CELL_BYTES, (offset + size - 1) // CELL_BYTES + 1)
        if self._done.keys() >= set(cells):
            return
        with self._guard:
            for cell in cells:
                if cell not in self._done:
                    start = cell * CELL_BYTES
                    self._lock(memory := self._memory.run(start, CELL_BYTES))
                    self._done[cell] = memory

    def close(self) -> None:
        """Nothing copies there any more."""
        with self._guard:
            self._done.clear()
