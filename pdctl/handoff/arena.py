"""Page memory from one allocation, for engines whose copies need it made once (page-locked), and
for devices.

A prompt's pages are one run of it. The run is taken until nobody holds it any more: an engine may
still be copying into it when its handoff has ended, and says so by holding on.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pdctl.handoff.device import DeviceMemory, Run

Bytes = NDArray[np.uint8]
Held = TypeVar("Held")


class Arena(Generic[Held]):
    """First fit over the free runs, lowest address first. One caller at a time takes; runs come
    back on any thread, also inside a call of this, so that is done without a lock.

    Args:
        size: bytes that there are.
        run: (offset, bytes) → what is held; each time an object of its own.
    """

    def __init__(self, size: int, run: Callable[[int, int], Held]) -> None:
        self._run = run
        self._free = [(0, size)]
        """(start, stop) of each free run; ascending, never adjacent."""
        self._back: deque[tuple[int, int]] = deque()

    def take(self, size: int) -> Held | None:
        """A run of that many bytes, as it was left; None while none is free."""
        self._collect()
        for at, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[at : at + 1] = [(start + size, stop)] if start + size < stop else []
                run = self._run(start, size)
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


def arena_of(memory: Bytes) -> Arena[Bytes]:
    """Its runs are arrays."""
    view = memory.data

    def run(start: int, size: int) -> Bytes:
        return np.frombuffer(view, np.uint8, size, start)

    return Arena(memory.nbytes, run)


def device_arena(memory: DeviceMemory) -> Arena[Run]:
    return Arena(memory.size, partial(Run, memory))
