"""A receiver's reads out of a sender's memory: in which order, what becomes of them, their end.

From host memory piece by piece, each hashed and placed as it lands. From a device's several at a
time; what has landed is placed by the device itself, meanwhile.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from pdctl.errors import HandoffError, ProtocolViolation
from pdctl.handoff.device import Run
from pdctl.handoff.link import Link
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.sink import Piece
from pdctl.handoff.slots import Slot, Slots
from pdctl.handoff.transport.reach import Pull, Reach, Rows, rows
from pdctl.handoff.wire import Part

DEPTH = 8
"""Reads that one handoff has under way: 4 MiB, what a link of 10 GB/s and 0.4 ms holds."""
DRAIN_S = 5.0
"""How long an end waits for what is under way. A read that outlasts it keeps its slot until it is
over: memory that bytes may still arrive in is never used again."""
DEVICE_DEPTH = 3
"""Reads of several pieces: one is placed, one lands, one is asked for."""
PAUSES_S = (50e-6, 1e-3)
"""Between two looks at reads under way: the first, and the longest."""


class NotAsPlaced(ProtocolViolation):
    """The sender has used the memory for something else, which it does only after it has given
    the room up: then its word on that is on the way. Or the bytes were corrupted."""


def is_over(pull: Pull) -> bool:
    """Whether no byte may arrive any more."""
    try:
        return pull.landed()
    except HandoffError:
        return True


class Asked(msgspec.Struct, frozen=True):
    """A piece that the sender has placed; in a device's memory those of the pages that follow it
    too, a page's bytes apart."""

    part: Part
    address: int
    device: int
    size: int
    """Bytes of each."""
    xxh3: int | None = None
    """None in a device's memory."""
    pages: int = 1

    @property
    def whole(self) -> int:
        """Bytes of all."""
        return self.size * self.pages

    def rows(self, geometry: PageGeometry) -> Rows:
        every = geometry.page_bytes
        return rows(self.address, self.size, self.device, every=every, times=self.pages)

    def split(self, pages: int, geometry: PageGeometry) -> tuple[Asked, Asked]:
        """The first pages of several, and the others."""
        part = msgspec.structs.replace(self.part, page=self.part.page + pages)
        others = msgspec.structs.replace(
            self,
            part=part,
            address=self.address + pages * geometry.page_bytes,
            pages=self.pages - pages,
        )
        return msgspec.structs.replace(self, pages=pages), others


class Flight(msgspec.Struct, Generic[Slot], frozen=True):
    """One read that was begun."""

    asked: Sequence[Asked]
    slot: Slot
    pull: Pull

    def is_over(self) -> bool:
        """Whether its slot is free."""
        return is_over(self.pull) and self.pull.release()


class Pulls(ABC, Generic[Slot]):
    """Those of one handoff, in the order in which the sender placed. One thread at a time."""

    depth = DEPTH
    told_every = 32
    """Pieces: how often the sender of many learns that they were read, before the last one."""

    def __init__(self, reach: Reach, slots: Slots[Slot], link: Link) -> None:
        self._reach = reach
        self._slots = slots
        self._link = link
        self._waiting: deque[Asked] = deque()
        self._under_way: deque[Flight[Slot]] = deque()
        self.taken = 0
        """Pieces that were read so far."""

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._under_way

    def add(self, asked: Asked) -> None:
        """Raises ProtocolViolation for what can't be read into a slot."""
        if asked.size > self._slots.size:
            raise ProtocolViolation(f"{asked.size} bytes placed at once: no slot holds them")
        self._waiting.append(asked)

    def step(self) -> bool:
        """Takes the oldest where it is there, else begins the next: on one host a piece lands
        as it is begun, and is hashed and placed while the cache still has it. False where
        nothing moved. Raises PeerLost, ProtocolViolation, and what the engine raises."""
        if self._under_way and self._under_way[0].pull.landed():
            self._take(self._under_way[0])
            return True
        return self._begin()

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """Steps until it is idle or the condition is over."""
        pause_s, longest_s = PAUSES_S
        while not self.idle:
            if self.step():
                pause_s = PAUSES_S[0]
                if not condition():
                    return
                continue
            if not condition():
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def drain(self) -> None:
        """The handoff is over: waits, bounded, for what is under way. Never raises."""
        self._waiting.clear()
        until = time.monotonic() + DRAIN_S
        while self._under_way:
            flight = self._under_way.popleft()
            self._free_by(until, flight.is_over, flight.slot)

    def _free_by(self, until: float, over: Callable[[], bool], slot: Slot) -> None:
        pause_s, longest_s = PAUSES_S
        while not over():
            if time.monotonic() >= until:
                self._slots.give_later(over, slot)
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        self._slots.give(slot)

    @abstractmethod
    def _take(self, flight: Flight[Slot]) -> None:
        """The oldest has landed."""

    @abstractmethod
    def _next(self) -> Sequence[Asked]:
        """Takes what is to be asked for at once from those that wait; never empty."""

    @abstractmethod
    def _cut(self, slot: Slot, size: int) -> Slot: ...

    def _begin(self) -> bool:
        begins = self._waiting and len(self._under_way) < self.depth
        slot = self._slots.take() if begins else None
        if slot is None:
            return False
        try:
            asked = self._next()
            into = self._cut(slot, sum(each.whole for each in asked))
            there = [each.rows(self._link.geometry) for each in asked]
            pull = self._reach.pull(self._link.card, np.concatenate(there), into)
        except BaseException:
            self._slots.give(slot)
            raise
        self._under_way.append(Flight(asked, slot, pull))
        return True

    def _landed(self, size: int) -> None:
        self._link.payload_at = self._link.clock()
        self._link.payload_bytes += size


class HostPulls(Pulls[memoryview]):
    """Args:
    place: takes each piece, checked; what it is given stays valid until it returns.
    """

    def __init__(
        self,
        reach: Reach,
        slots: Slots[memoryview],
        link: Link,
        place: Callable[[Part, memoryview], None],
    ) -> None:
        super().__init__(reach, slots, link)
        self._place = place

    def _next(self) -> Sequence[Asked]:
        return [self._waiting.popleft()]

    def _cut(self, slot: memoryview, size: int) -> memoryview:
        return slot[:size]

    def _take(self, flight: Flight[memoryview]) -> None:
        (asked,) = flight.asked
        piece = flight.slot[: asked.size]
        if xxh3_64_intdigest(piece) != asked.xxh3:
            raise NotAsPlaced(f"page {asked.part.page} is not what was placed")
        self._landed(asked.size)
        self._place(asked.part, piece)
        self._under_way.popleft()
        self._free_by(0.0, flight.is_over, flight.slot)
        self.taken += 1


class DevicePulls(Pulls[Run]):
    """Nothing is hashed: no byte comes to this interpreter. Made by the thread that is to read.

    Args:
        place: begins to place pieces that have landed; returns whether they are placed, to be
            asked again and again. Where it raises, nothing reads them any more.
    """

    depth = DEVICE_DEPTH
    told_every = 1024

    def __init__(
        self,
        reach: Reach,
        slots: Slots[Run],
        link: Link,
        place: Callable[[Sequence[Piece]], Callable[[], bool]],
    ) -> None:
        super().__init__(reach, slots, link)
        slots.bind()
        self._place = place

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """Where the stream says more already, and a slot would not be full, that is heard first:
        it is asked for with the rest."""
        waiting = sum(asked.whole for asked in self._waiting)
        if self._under_way and waiting < self._slots.size and not condition():
            return
        super().wait_while(condition)

    def _next(self) -> Sequence[Asked]:
        """As much as fills a slot."""
        taken: list[Asked] = []
        room = self._slots.size
        while self._waiting and (pages := room // self._waiting[0].size):
            asked = self._waiting.popleft()
            if asked.pages > pages:
                asked, others = asked.split(pages, self._link.geometry)
                self._waiting.appendleft(others)
            taken.append(asked)
            room -= asked.whole
        return taken

    def _cut(self, slot: Run, size: int) -> Run:
        return slot.part(0, size)

    def _take(self, flight: Flight[Run]) -> None:
        pieces, at = [], 0
        for asked in flight.asked:
            part, run = asked.part, flight.slot.part(at, asked.whole)
            pieces.append(Piece(part.page, part.first_layer, part.layers, run, asked.pages))
            at += run.size
        self._landed(at)
        placed = self._place(pieces)
        self._under_way.popleft()
        over = placed if flight.pull.release() else lambda: placed() and flight.is_over()
        # not kept here: this thread may wait for the sender long after they are placed
        self._slots.give_later(over, flight.slot)
        self.taken += sum(asked.pages for asked in flight.asked)
