"""Whole pages of a prompt, out of memory that another process made, into an engine's KV memory on a
GPU.

Pages that the GPU reads where they lie are copied by one launch per part. Others pass through two
buffers in turn, so that one is filled while the GPU reads the other; pages that lie next to each
other are one copy, because every one gives the interpreter away and waits to have it back.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pdctl.engines.cuda.kernel import Copies
from pdctl.engines.cuda.writing import Copying, Piece, Writer
from pdctl.handoff.arena import Bytes
from pdctl.handoff.page import PageGeometry, Patterns

PART_BYTES = 16 << 20
"""Of pages, at least one, copied by one launch."""
BUFFERS = 2


class Filler:
    """Any thread; one prompt at a time.

    Args:
        memory: makes page-locked memory.
    """

    def __init__(
        self, copies: Copies, writer: Writer, pages: PageGeometry, memory: Callable[[int], Bytes]
    ) -> None:
        self._copies, self._writer, self._pages = copies, writer, pages
        self._memory = memory
        self._part = max(1, PART_BYTES // pages.page_bytes)
        self._one_at_a_time = threading.Lock()
        self._buffers: list[Bytes] = []

    def fill(self, places: NDArray[np.int64], start: int, pages: Sequence[Patterns]) -> None:
        """Returns once these positions stand in the engine's memory.

        Args:
            places: as `kernel.Tokens` has them, of the positions from `start` on.
            pages: the prompt's, from its first on; page-sized and contiguous, each.
        """
        with self._one_at_a_time:
            under_way = deque[Copying]()
            try:
                for turn, (at, part) in enumerate(self._parts(start, len(places), pages)):
                    if len(under_way) == BUFFERS:
                        under_way.popleft().synchronize()
                    begins = self._within_reach(part, turn % BUFFERS)
                    under_way.append(self._begin(places[at - start], at, begins, part))
            finally:
                # what they read is another's once this has returned
                for copying in under_way:
                    copying.synchronize()

    def _parts(
        self, start: int, count: int, pages: Sequence[Patterns]
    ) -> Iterator[tuple[NDArray[np.int64], Sequence[Patterns]]]:
        """Positions, and the pages that they lie in."""
        size, stop = self._pages.page_tokens, start + count
        last = self._pages.pages_for(stop)
        for first in range(start // size, last, self._part):
            end = min(first + self._part, last)
            yield np.arange(max(start, first * size), min(stop, end * size)), pages[first:end]

    def _begin(
        self,
        places: NDArray[np.int64],
        at: NDArray[np.int64],
        begins: NDArray[np.int64],
        part: Sequence[Patterns],
    ) -> Copying:
        size = self._pages.page_tokens
        addresses = begins[at // size - at[0] // size] + self._copies.addresses(0, at % size)
        layers = range(self._pages.layers)
        return self._writer.begin([Piece(np.stack([places, addresses]), layers, part)])

    def _within_reach(self, part: Sequence[Patterns], turn: int) -> NDArray[np.int64]:
        """Addresses of those pages, or of copies of them, that the GPU reads."""
        size = self._pages.page_bytes
        begins = np.array([address_of(page) for page in part], np.int64)
        cuts = np.flatnonzero(np.diff(begins) != size) + 1
        for run in np.split(np.arange(len(begins)), cuts):
            first, length = int(begins[run[0]]), len(run) * size
            if not self._copies.reaches_at(first, length):
                near = self._buffer(turn).ctypes.data + int(run[0]) * size
                # unlike an assignment of numpy's, it has no layout to look at
                ctypes.memmove(near, first, length)
                begins[run] = near + np.arange(len(run)) * size
        return begins

    def _buffer(self, turn: int) -> Bytes:
        while len(self._buffers) <= turn:
            self._buffers.append(self._memory(self._part * self._pages.page_bytes))
        return self._buffers[turn]


def address_of(page: Patterns) -> int:
    found: int = page.__array_interface__["data"][0]
    return found
