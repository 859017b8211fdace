"""The memory that pages lie in: one file without a name, mapped by the store and its replicas.

The store makes it and hands its descriptor over the socket, so nothing is left of it when the
last process that has it mapped ends, however that happens.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import tempfile

import numpy as np

from pdctl.handoff.arena import Bytes
from pdctl.handoff.page import PATTERN, PageGeometry, Patterns

SHORT = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG})


class PageMemory:
    """`slots` pages of one geometry. The creating end gives slots their memory with `back`;
    nobody touches a slot that has none."""

    def __init__(self, descriptor: int, slots: int, geometry: PageGeometry) -> None:
        """Maps a descriptor, which stays the caller's."""
        self.slots = slots
        self.page_bytes = geometry.page_bytes
        self._geometry = geometry
        self._map = memoryview(mmap.mmap(descriptor, slots * geometry.page_bytes))

    def page(self, slot: int, *, writable: bool = False) -> Patterns:
        """`[layers, 2, page_tokens, kv_heads, head_dim]`, where it lies. IndexError for a slot
        that there is not."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        size = self._geometry.page_bytes
        raw = self._map[slot * size : (slot + 1) * size]
        pages = np.frombuffer(raw, PATTERN).reshape(self._geometry.shape)
        pages.flags.writeable = writable
        return pages

    def run(self, first: int, stop: int) -> Bytes:
        """Slots [first, stop), as they lie."""
        return np.frombuffer(self._map[first * self.page_bytes : stop * self.page_bytes], np.uint8)


def create(slots: int, geometry: PageGeometry) -> int:
    """A descriptor of that size, of which no page takes memory yet. Raises OSError."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("pdctl-pages", os.MFD_CLOEXEC)
    else:
        descriptor, path = tempfile.mkstemp(prefix="pdctl-pages-")
        os.unlink(path)
    try:
        os.ftruncate(descriptor, slots * geometry.page_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def back(descriptor: int, slot: int, page_bytes: int) -> bool:
    """Gives one slot its memory; False where there is none, which is better known here than
    by the signal that would end a process at its first touch."""
    try:
        if sys.platform == "linux":
            os.posix_fallocate(descriptor, slot * page_bytes, page_bytes)
        else:
            os.pwrite(descriptor, bytes(page_bytes), slot * page_bytes)
    except OSError as error:
        if error.errno in SHORT:
            return False
        raise
    return True
