"""What a receiver reads pieces into: memory of a fixed size, exposed once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import numpy as np

from pdctl.handoff.device import DeviceMaker, DeviceMemory, Run
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.schedule import DEVICE_PIECE_BYTES, PIECE_BYTES
from pdctl.handoff.transport.reach import Reach

SLOTS = 64
"""Of one process: 32 MiB at the usual size of a piece."""
DEVICE_SLOTS = 8
DEVICE_SLOT_BYTES = 16 << 20
"""Several pieces are asked for at once: a request's cost is Python's, whatever it moves."""

Slot = TypeVar("Slot", bound=memoryview | Run)


class Slots(Generic[Slot]):
    """Thread-safe; nothing here waits."""

    def __init__(
        self, slots: Iterable[Slot], size: int, bind: Callable[[], None] = lambda: None
    ) -> None:
        self.bind = bind
        """As `DeviceMemory.bind`."""
        self.size = size
        """Bytes of each."""
        self._lock = threading.Lock()
        self._free = list(slots)
        self.count = len(self._free)
        self._late: list[tuple[Callable[[], bool], Slot]] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> Slot | None:
        if not self._free:
            self.look_again()
        with self._lock:
            return self._free.pop() if self._free else None

    def give(self, slot: Slot) -> None:
        with self._lock:
            self._free.append(slot)

    def give_later(self, over: Callable[[], bool], slot: Slot) -> None:
        """Somebody still writes it or reads it: it comes back once `over` says so, which is asked
        on any thread, where a slot is missing and by `look_again`, and never raises."""
        with self._lock:
            self._late.append((over, slot))

    def look_again(self) -> None:
        with self._lock:
            late, self._late = self._late, []
        if late:
            self.bind()
        for over, slot in late:
            if over():
                self.give(slot)
            else:
                self.give_later(over, slot)


def host_slots(reach: Reach, geometry: PageGeometry) -> Slots[memoryview]:
    """Raises HandoffError where they can't be exposed."""
    size = max(PIECE_BYTES, geometry.layer_bytes)
    memory = np.empty(SLOTS * size, np.uint8)
    reach.expose(memory)
    view = memory.data
    return Slots((view[at * size : (at + 1) * size] for at in range(SLOTS)), size)


def device_slots(reach: Reach, geometry: PageGeometry, make: DeviceMaker) -> Slots[Run]:
    """Raises MemoryError, and HandoffError where they can't be exposed."""
    size = max(DEVICE_SLOT_BYTES, DEVICE_PIECE_BYTES, geometry.layer_bytes)
    memory: DeviceMemory = make(DEVICE_SLOTS * size)
    reach.expose(memory)
    return Slots((Run(memory, at * size, size) for at in range(DEVICE_SLOTS)), size, memory.bind)
