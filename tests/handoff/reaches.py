"""Transports whose receivers read pieces out of the sender's memory: NIXL's, and one without a
library, inside this process, that tests can stall and break."""

from __future__ import annotations

import ctypes
import secrets
import threading
from functools import cache

import numpy as np
import pytest

from pdctl.errors import PeerLost
from pdctl.handoff.arena import Bytes
from pdctl.handoff.device import DeviceMemory, Run
from pdctl.handoff.transport.nixl import NixlReach, installed
from pdctl.handoff.transport.reach import Reach, Rows, Where, address_of
from pdctl.handoff.transport.tcp import TcpTransport


class InProcess:
    """What all `MemoryReach`es of one transport share: which card exposes what, and the faults."""

    def __init__(self) -> None:
        self.exposed: dict[bytes, list[tuple[int, int]]] = {}
        self.begun = threading.Event()
        """A read was begun."""
        self.proceed = threading.Event()
        """Unset: reads that are begun stay under way."""
        self.proceed.set()
        self.fails = False
        """Reads that are under way end so."""
        self.pulls: list[MemoryPull] = []


class MemoryReach:
    """A `Reach` that copies inside this process."""

    name = "memory"

    def __init__(self, shared: InProcess) -> None:
        self._shared = shared
        self._card = secrets.token_bytes(8)
        self.met: list[tuple[Where, bytes]] = []
        self.closed = False
        shared.exposed[self._card] = []

    def expose(self, memory: Bytes | DeviceMemory) -> None:
        host = isinstance(memory, np.ndarray)
        row = (memory.ctypes.data, memory.nbytes) if host else (memory.address, memory.size)
        self._shared.exposed[self._card].append(row)

    def card(self) -> bytes:
        return self._card

    def meet(self, where: Where, card: bytes) -> None:
        self.met.append((where, card))

    def pull(self, card: bytes, there: Rows, into: memoryview | Run) -> MemoryPull:
        regions = self._shared.exposed.get(card, [])
        for address, length, _ in there.tolist():
            if not any(at <= address and address + length <= at + size for at, size in regions):
                raise PeerLost("that memory is not exposed")
        pull = MemoryPull(self._shared, there, into)
        self._shared.pulls.append(pull)
        self._shared.begun.set()
        return pull

    def close(self) -> None:
        self.closed = True
        self._shared.exposed.pop(self._card, None)


class MemoryPull:
    """A `Pull` that copies when it is first looked at after `proceed`."""

    def __init__(self, shared: InProcess, there: Rows, into: memoryview | Run) -> None:
        self._shared = shared
        self.there = there
        self._into = into.address if isinstance(into, Run) else address_of(into)
        self.over = self.released = False

    def landed(self) -> bool:
        if self.over:
            return True
        if not self._shared.proceed.is_set():
            return False
        if self._shared.fails:
            raise PeerLost("the memory's owner is gone")
        here = self._into
        for address, length, _ in self.there.tolist():
            ctypes.memmove(here, address, length)
            here += length
        self.over = True
        return True

    def release(self) -> bool:
        self.released = self.over or self._shared.fails
        return self.released


class Read(TcpTransport):
    """TCP for everything but the pages' bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = InProcess()

    def make_reach(self, replica: str) -> Reach:
        return MemoryReach(self.shared)


class Lent(NixlReach):
    """An agent that outlives its end: it takes most of a second to make."""

    def close(self) -> None:
        with self._lock:
            for registered, _ in self._exposed:
                self._agent.deregister_memory(registered)
            self._exposed.clear()
            for card in list(self._peers):
                self._drop(card)
            self._shown.clear()
            assert not self._pulling


@cache
def _lent(replica: str) -> Lent:
    return Lent(replica)


class Nixl(TcpTransport):
    keeps_descriptors = True
    """Those of agents, which stay."""

    def make_reach(self, replica: str) -> Reach:
        return _lent(replica)


READS = [pytest.param(Read, id="read")]
"""For fixtures that make a transport."""
if installed() is not None:
    READS.append(pytest.param(Nixl, id="nixl"))
