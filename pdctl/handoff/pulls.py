"""A receiver's reads out of a sender's memory: where they land, in which order, and their end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from pdctl.errors import HandoffError, ProtocolViolation
from pdctl.handoff.link import Link
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.schedule import PIECE_BYTES
from pdctl.handoff.transport.reach import Pull, Reach
from pdctl.handoff.wire import Header, Placed

SLOTS = 64
"""Of one process: 32 MiB at the usual size of a piece."""
DEPTH = 8
"""Reads that one handoff has under way: 4 MiB, what a link of 10 GB/s and 0.4 ms holds."""
DRAIN_S = 5.0
"""How long an end waits for what is under way. A read that outlasts it keeps its slot until it is
over: memory that bytes may still arrive in is never used again."""
PAUSES_S = (50e-6, 1e-3)
"""Between two looks at reads under way: the first, and the longest."""


class Slots:
    """What pieces land in: one block, exposed once. Thread-safe; nothing here waits."""

    def __init__(self, reach: Reach, geometry: PageGeometry) -> None:
        self.size = max(PIECE_BYTES, geometry.layer_bytes)
        memory = np.empty(SLOTS * self.size, np.uint8)
        reach.expose(memory)
        view = memory.data
        self._lock = threading.Lock()
        self._free = [view[at * self.size : (at + 1) * self.size] for at in range(SLOTS)]
        self._late: list[tuple[Pull, memoryview]] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> memoryview | None:
        with self._lock:
            return self._free.pop() if self._free else None

    def give(self, slot: memoryview) -> None:
        with self._lock:
            self._free.append(slot)

    def give_later(self, pull: Pull, slot: memoryview) -> None:
        """The read is not over: its slot comes back when `look_again` finds that it is."""
        with self._lock:
            self._late.append((pull, slot))

    def look_again(self) -> None:
        with self._lock:
            late, self._late = self._late, []
        for pull, slot in late:
            if is_over(pull) and pull.release():
                self.give(slot)
            else:
                self.give_later(pull, slot)


class NotAsPlaced(ProtocolViolation):
    """The sender has used the memory for something else, which it does only after it has given
    the room up: then its word on that is on the way. Or the bytes were corrupted."""


def is_over(pull: Pull) -> bool:
    """Whether no byte may arrive any more."""
    try:
        return pull.landed()
    except HandoffError:
        return True


class Flight(msgspec.Struct, frozen=True):
    """One read that was begun."""

    header: Header
    placed: Placed
    slot: memoryview
    pull: Pull


class Pulls:
    """Those of one handoff, in the order of the sender's Placed. One thread at a time.

    Args:
        place: takes each piece, checked; what it is given stays valid until it returns.
    """

    def __init__(
        self,
        reach: Reach,
        slots: Slots,
        link: Link,
        place: Callable[[Header, memoryview], None],
    ) -> None:
        self._reach = reach
        self._slots = slots
        self._link = link
        self._place = place
        self._waiting: deque[tuple[Header, Placed]] = deque()
        self._under_way: deque[Flight] = deque()
        self.taken = 0
        """Pieces placed so far."""

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._under_way

    def add(self, header: Header, placed: Placed) -> None:
        """Raises ProtocolViolation for what can't be read into a slot, or not be checked."""
        if self._size(header) > self._slots.size or placed.xxh3 is None:
            raise ProtocolViolation(
                f"{header.layers} layers placed at once, "
                f"{'unhashed' if placed.xxh3 is None else 'more than a slot holds'}"
            )
        self._waiting.append((header, placed))

    def step(self) -> bool:
        """Places the oldest where it is there, else begins the next: on one host a piece lands
        as it is begun, and is hashed and placed while the cache still has it. False where
        nothing moved. Raises PeerLost, ProtocolViolation, and what `place` raises."""
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
        pause_s, longest_s = PAUSES_S
        while self._under_way and time.monotonic() < until:
            if is_over(self._under_way[0].pull):
                self._free(self._under_way.popleft())
                continue
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        while self._under_way:
            flight = self._under_way.popleft()
            self._slots.give_later(flight.pull, flight.slot)

    def _take(self, flight: Flight) -> None:
        size = self._size(flight.header)
        piece = flight.slot[:size]
        if xxh3_64_intdigest(piece) != flight.placed.xxh3:
            raise NotAsPlaced(
                f"page {flight.header.page} of room {flight.header.room} is not what was placed"
            )
        self._link.payload_at = self._link.clock()
        self._link.payload_bytes += size
        self._place(flight.header, piece)
        self._under_way.popleft()
        self._free(flight)
        self.taken += 1

    def _begin(self) -> bool:
        if not self._waiting or len(self._under_way) == DEPTH:
            return False
        slot = self._slots.take()
        if slot is None:
            return False
        header, placed = self._waiting.popleft()
        try:
            into = slot[: self._size(header)]
            pull = self._reach.pull(self._link.card, placed.address, placed.device, into)
        except BaseException:
            self._slots.give(slot)
            raise
        self._under_way.append(Flight(header, placed, slot, pull))
        return True

    def _free(self, flight: Flight) -> None:
        if flight.pull.release():
            self._slots.give(flight.slot)
        else:
            self._slots.give_later(flight.pull, flight.slot)

    def _size(self, header: Header) -> int:
        return header.layers * self._link.geometry.layer_bytes
