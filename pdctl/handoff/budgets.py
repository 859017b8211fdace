"""A sender's page memory: of the host, of a device, or both, by who is to receive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pdctl.handoff.arena import Bytes, arena_of, device_arena
from pdctl.handoff.budget import Budget
from pdctl.handoff.device import DeviceMaker
from pdctl.handoff.schedule import DEVICE_PIECE_BYTES
from pdctl.handoff.transport.reach import Reach


class Place(NamedTuple):
    """Where one prompt's pages are to lie."""

    budget: Budget
    reads: bool | None = None
    """Receivers can only read them, or only be sent them; None: as they like."""
    piece_bytes: int | None = None
    """What a piece may have; None: the usual."""

    @property
    def on_device(self) -> bool:
        return self.piece_bytes is not None


class Budgets:
    """Each of its memories has all the bytes. Thread-safe.

    Args:
        size: bytes.
        memory: makes host memory at once; None: as it is asked for, unless it is to be read.
        device: makes that of a device; None: there is none.
        reach: exposes what is to be read: a device's where there is one.
        reads: whether a decode replica reads out of a device's.
        changed: told (bytes used, waiters) of all at every change; it must not block.

    Raises:
        MemoryError: there is not as much.
        HandoffError: it can't be exposed.
    """

    def __init__(
        self,
        size: int,
        *,
        memory: Callable[[int], Bytes] | None,
        device: DeviceMaker | None,
        reach: Reach | None,
        reads: Callable[[str], bool],
        changed: Callable[[int, int], None],
    ) -> None:
        self._reads = reads
        self._changed = changed
        self._lock = threading.Lock()
        self._told = {"host": (0, 0), "device": (0, 0)}
        if memory is None and device is None and reach is not None:
            memory = _ordinary
        arena = None if memory is None else arena_of(made := memory(size))
        if arena is not None and device is None and reach is not None:
            reach.expose(made)
        self._host = Budget(size, arena=arena, changed=self._tell("host"))
        self._device: Budget | None = None
        if device is not None:
            there = device(size)
            if reach is not None:
                reach.expose(there)
            self._device = Budget(size, arena=device_arena(there), changed=self._tell("device"))

    def place_for(self, decode: str) -> Place:
        if self._device is None:
            return Place(self._host)
        if self._reads(decode):
            return Place(self._device, reads=True, piece_bytes=DEVICE_PIECE_BYTES)
        return Place(self._host, reads=False)

    def look_again(self) -> None:
        """As `Budget.look_again`."""
        self._host.look_again()
        if self._device is not None:
            self._device.look_again()

    def _tell(self, which: str) -> Callable[[int, int], None]:
        def changed(used: int, waiters: int) -> None:
            with self._lock:
                self._told[which] = (used, waiters)
                self._changed(*(sum(each) for each in zip(*self._told.values(), strict=True)))

        return changed


def _ordinary(size: int) -> Bytes:
    """Its pages are the system's until they are first written."""
    return np.empty(size, np.uint8)
