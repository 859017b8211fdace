"""The seam beside the streams: memory of this process that peers read, and reads of theirs.

The receiver reads, the sender never writes: what a read lands in is freed by whoever began the
read, and knows whether it is over. A peer that is frozen, cut off or long dead can't reach into
memory that has been given to another handoff meanwhile.

Foreign exceptions end here. Nothing that a peer sent is unpickled, and no address of a peer's is
used but against what its card says it exposed.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdctl.handoff.arena import Bytes
from pdctl.handoff.device import DeviceMemory, Run

Where = tuple[str, int]
"""A sender's address, as it is dialled."""


Rows = NDArray[np.uint64]
"""Stretches of memory, as their owner counts: `[rows, 3]`, each its address, its bytes and its
device."""


def rows(address: int, size: int, device: int, *, every: int = 0, times: int = 1) -> Rows:
    """One stretch, or as many, each `every` bytes behind the one before; those that touch are
    one."""
    if every == size or times == 1:
        return np.array([(address, size * times, device)], np.uint64)
    found = np.empty((times, 3), np.uint64)
    found[:, 0] = np.arange(times, dtype=np.uint64) * np.uint64(every) + np.uint64(address)
    found[:, 1:] = size, device
    return found


def address_of(memory: memoryview) -> int:
    """Of its first byte, in this process."""
    return np.frombuffer(memory, np.uint8).ctypes.data


class Pull(Protocol):
    """One read of a peer's memory, under way or over. One thread at a time."""

    def landed(self) -> bool:
        """True once the bytes are there; never waits for the peer. Raises PeerLost where they
        will not come."""
        ...

    def release(self) -> bool:
        """Frees it, after whatever `landed` said; False while bytes may still arrive: what they
        arrive in is to be kept, and this called again. Never raises."""
        ...


class Reach(Protocol):
    """One per process. Any thread may call any method.

    Order: `expose` and `card` on a sender; `meet`, then `pull`, on a receiver; `close` last,
    after every pull was released.
    """

    name: str
    """As `handoff.transport` spells it."""

    def expose(self, memory: Bytes | DeviceMemory) -> None:
        """Lets peers read it, until `close`. Raises HandoffError where that can't be."""
        ...

    def card(self) -> bytes:
        """What a peer needs to read what was exposed so far."""
        ...

    def meet(self, where: Where, card: bytes) -> None:
        """The sender there shows this card; the one that it showed before is forgotten, once
        nothing is read by it. Raises PeerLost for a card that is none."""
        ...

    def pull(self, card: bytes, there: Rows, into: memoryview | Run) -> Pull:
        """Begins to read those rows, one behind the other, into as many bytes of exposed memory.
        May return after they have come. Raises PeerLost where the card does not cover them, or
        its owner is gone."""
        ...

    def close(self) -> None:
        """Peers read nothing any more. Never raises."""
        ...
