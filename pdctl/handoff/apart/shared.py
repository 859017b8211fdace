"""Memory that two processes have, by descriptor: pages and pieces lie in it."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np

from pdctl.handoff.arena import Bytes


class SharedMemory:
    """Zeroed until it is written, and only then taken from the system. Linux only.

    Freed with the last mapping and the last descriptor; this owns one of each.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        mapped = mmap.mmap(descriptor, size)
        # read once, in order, by hash and socket: in small pages it is the look-up that counts
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: Bytes = np.frombuffer(mapped, dtype=np.uint8)
        self._buffer = memoryview(mapped)
        self._address = self.bytes.ctypes.data

    @classmethod
    def make(cls, size: int) -> SharedMemory:
        """Raises OSError where the system has no more."""
        descriptor = os.memfd_create("pdctl-pages")
        try:
            os.ftruncate(descriptor, size)
            return cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    def run(self, offset: int, size: int) -> Bytes:
        """An array of its own: nobody else's view keeps it alive.

        Raises:
            ValueError: it does not lie in this memory.
        """
        if not 0 <= offset <= offset + size <= self.size:
            raise ValueError(f"{size} bytes at {offset} are not in {self.size}")
        return np.frombuffer(self._buffer, np.uint8, size, offset)

    def offset_of(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> int:
        """Where an array over this memory begins."""
        return array.ctypes.data - self._address

    def close(self) -> None:
        """From now on there are no more runs; the mapping goes with the last array over it."""
        os.close(self.descriptor)
        self.size = 0
        self.bytes, self._buffer = np.empty(0, np.uint8), memoryview(b"")
