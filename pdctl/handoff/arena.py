"""Page memory from one allocation, for engines whose copies need it made once (page-locked).

A prompt's pages are one run of it. The run is taken until nobody holds the array any more: an
engine may still be copying into it when its handoff has ended, and says so by holding on.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Arena:
    """First fit over the free runs, lowest address first. One caller at a time takes; runs come
    back on any thread, also inside a call of this, so that is done without a lock."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory.data
        self._free = [(0, memory.nbytes)]
        """(start, stop) of each free run; ascending, never adjacent."""
        self._back: deque[tuple[int, int]] = deque()

    def take(self, size: int) -> Bytes | None:
        """A run of that many bytes, as it was left; None while none is free."""
        self._collect()
        for at, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[at : at + 1] = [(start + size, stop)] if start + size < stop else []
                run = np.frombuffer(self._memory, np.uint8, size, start)
                weakref.finalize(run, self._back.append, (start, start + size)).atexit = False
                return run
        return None

    def _collect(self) -> None:
        while self._back:
            self._free.append(self._back.popleft())
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(self._free):
            if merged and merged[-1][1] == start:
                start = merged.pop()[0]
            merged.append((start, stop))
        self._free = merged
