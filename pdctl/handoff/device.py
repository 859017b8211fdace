"""Memory that is named by address and never looked into here: a device's.

An engine's adapter makes it, once; NIXL and the adapter's own kernels read and write it. The host's
memory can be treated so too, and then a whole handoff runs without a device.
"""

from __future__ import annotations

import enum
from typing import Protocol

from pdctl.errors import HandoffError
from pdctl.handoff.page import Patterns


class MemoryKind(enum.StrEnum):
    """As NIXL names it."""

    HOST = "DRAM"
    DEVICE = "VRAM"


class DeviceMemory(Protocol):
    """One allocation, freed with the last reference. Any thread may call any method."""

    kind: MemoryKind
    address: int
    size: int
    """Bytes."""
    index: int
    """The device's, as this process counts."""

    def bind(self) -> None:
        """The calling thread is about to have this memory copied by a library that asks which
        device is the thread's."""
        ...

    def clear(self, offset: int, size: int, every: int, times: int) -> None:
        """Zeroes `size` bytes at `offset`, and again each `every` bytes, `times` in all; they are
        zero when it returns, some 0.1 ms later: not for an engine's own thread."""
        ...


class DeviceMaker(Protocol):
    """How an engine's adapter makes such memory."""

    kind: MemoryKind

    def __call__(self, size: int) -> DeviceMemory:
        """Raises MemoryError, saying how much is free."""
        ...


class Run:
    """Bytes of such memory; they are their owner's as long as anybody holds this or a part."""

    __slots__ = ("__weakref__", "_whole", "memory", "offset", "size")

    def __init__(
        self, memory: DeviceMemory, offset: int, size: int, whole: Run | None = None
    ) -> None:
        self.memory = memory
        self.offset = offset
        self.size = size
        self._whole = whole

    @property
    def address(self) -> int:
        return self.memory.address + self.offset

    def part(self, offset: int, size: int) -> Run:
        """Raises ValueError where it does not lie in this."""
        if not 0 <= offset <= offset + size <= self.size:
            raise ValueError(f"{size} bytes at {offset} are not in {self.size}")
        return Run(self.memory, self.offset + offset, size, self)

    def clear(self, offset: int, size: int, every: int, times: int) -> None:
        """As the memory's, counted from where this begins."""
        self.memory.clear(self.offset + offset, size, every, times)


Pages = Patterns | Run
"""A prompt's pages: an array, or where they lie in such memory, in the same layout."""


def host_pages(pages: Pages) -> Patterns:
    """For an engine that has no device memory. Raises HandoffError."""
    if isinstance(pages, Run):
        raise HandoffError("these pages lie in a device's memory")
    return pages


def address_of_pages(pages: Pages) -> int:
    """Of their first byte."""
    return pages.address if isinstance(pages, Run) else pages.ctypes.data
