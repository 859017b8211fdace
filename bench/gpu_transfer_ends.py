"""What `gpu_transfer.py` measures between: an engine's KV memory and its end of handoffs, once in
each of two processes."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from data_plane import DIGEST, KEY, TIMEOUT_S, report
from nixl_plane import Alone
from xxhash import xxh3_64_hexdigest

from pdctl.engines.device import TorchDevice
from pdctl.engines.interface import Leg
from pdctl.engines.sglang.pool import Part, SlotPool
from pdctl.errors import HandoffError
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.device import Pages, Run
from pdctl.handoff.identity import Identity
from pdctl.handoff.opening import Opening, open_receiver
from pdctl.handoff.outbound import Outbound
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.sink import Piece, Want
from pdctl.handoff.ticket import mint
from pdctl.topology.model import PAGE_TOKENS, Transport

START_S = 120.0
"""What a process with a device may take until it is ready."""
HOST_CHUNK_PAGES = 8
"""Of which memory on the host is copied at a time."""


class Setting(NamedTuple):
    """One shape, in both processes."""

    geometry: PageGeometry
    tokens: int
    """Of the longest prompt."""
    device: str
    """As torch names it."""

    @property
    def pages(self) -> int:
        return self.geometry.pages_for(self.tokens)


def opening(
    geometry: PageGeometry, key: bytes, transport: Transport, *, buffer_bytes: int = 0
) -> Opening:
    """Of a sender where it has a buffer, else of a receiver."""
    sends = buffer_bytes > 0
    return Opening(
        identity=Identity("p0" if sends else "d0", key, DIGEST),
        geometry=geometry,
        sends=sends,
        timeout_s=TIMEOUT_S,
        buffer_bytes=buffer_bytes,
        transports=dict.fromkeys(("p0", "d0"), transport),
        on_device=transport is Transport.NIXL,
    )


def leg_to(port: int) -> Leg:
    """Of a request that begins at this moment; the sender listens there."""
    room = secrets.randbits(62)
    return Leg(
        room=room,
        ticket=mint(KEY, room, "p0", "d0", DIGEST, time.time() + TIMEOUT_S),
        prefill="p0",
        decode="d0",
        sender=f"127.0.0.1:{port}",
        timeout_s=TIMEOUT_S,
    )


def timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


class Kv:
    """KV memory as SGLang keeps it, of one sequence whose blocks lie in disorder."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.device = torch.device(setting.device)
        self.bind()
        self.geometry = geometry = setting.geometry
        torch.manual_seed(seed)
        shape = (setting.pages * PAGE_TOKENS, geometry.kv_heads, geometry.head_dim)
        halves = [
            [torch.randn(shape, dtype=torch.float16, device=self.device) for _ in range(layers)]
            for layers in (geometry.layers, geometry.layers)
        ]
        self._memory = SimpleNamespace(
            k_buffer=halves[0], v_buffer=halves[1], page_size=PAGE_TOKENS
        )
        self.blocks = torch.randperm(setting.pages).tolist()
        self.slots: Any = self._opened()

    def _opened(self) -> SlotPool:
        if self.device.type == "cpu":
            return SlotPool(self._memory, self.geometry)
        from pdctl.engines.cuda.stream import SideStream
        from pdctl.engines.sglang.cuda import CudaSlots

        table = [block * PAGE_TOKENS + slot for block in self.blocks for slot in range(PAGE_TOKENS)]
        rows = torch.tensor([table], dtype=torch.int32, device=self.device)
        return CudaSlots(self._memory, self.geometry, rows, SideStream(self.device))

    def bind(self) -> None:
        """The calling thread is about to use the device."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def clear(self) -> None:
        for half in (self._memory.k_buffer, self._memory.v_buffer):
            for layer in half:
                layer.zero_()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def digest(self, tokens: int) -> str:
        """Of the sequence's first tokens, in the first layer and the last."""
        at = torch.arange(tokens, device=self.device)
        blocks = torch.tensor(self.blocks, device=self.device)[at // PAGE_TOKENS]
        rows = blocks * PAGE_TOKENS + at % PAGE_TOKENS
        halves = (self._memory.k_buffer, self._memory.v_buffer)
        found = [half[layer][rows] for half in halves for layer in (0, -1)]
        return xxh3_64_hexdigest(torch.stack(found).cpu().view(torch.int16).numpy().tobytes())

    def bring(self, outbound: Outbound, tokens: int) -> None:
        """Into its pages, layer by layer as a forward does, or chunk by chunk on the host."""
        if not self.slots.leaves_by_layer:
            for first in range(0, self.geometry.pages_for(tokens), HOST_CHUNK_PAGES):
                stop = min(tokens, (first + HOST_CHUNK_PAGES) * PAGE_TOKENS)
                self.gather(stop, outbound.pages(), first)
                outbound.written(stop)
            return
        from pdctl.engines.sglang.cuda import Span

        self.slots.begin_step([Span(0, 0, tokens, outbound.pages())])
        for layer in range(self.geometry.layers):
            self.slots.gather(layer, lambda at=layer + 1: outbound.written(tokens, layers=at))

    def gather(self, tokens: int, pages: Pages, first: int = 0) -> None:
        """From that page on, waited for."""
        count = self.geometry.pages_for(tokens)
        last = tokens - (count - 1) * PAGE_TOKENS
        self.slots.read(self.blocks[first:count], first, last, pages)

    def part(self, piece: Piece, tokens: int) -> Part:
        blocks = self.blocks[piece.page : piece.page + piece.pages]
        return Part(blocks, min(piece.positions.stop, tokens) - piece.positions.start, piece)


class Sink:
    """A `DeviceSink` that fills such memory."""

    def __init__(self, kv: Kv) -> None:
        self._kv = kv
        self._tokens = 0

    def offered(self, tokens: int, deadline: float) -> Want:
        self._tokens = tokens
        return Want(tokens=tokens)

    def write_from(self, pieces: Sequence[Piece]) -> Callable[[], bool]:
        over: Callable[[], bool] = self._kv.slots.write_from(
            [self._kv.part(piece, self._tokens) for piece in pieces]
        )
        return over

    def commit(self, first_token: int | None) -> None:
        self._kv.slots.flush()

    def abort(self, error: HandoffError) -> None:
        self._kv.slots.flush()


def receive(orders: Connection, key: bytes, setting: Setting) -> None:
    """The receiving process: obeys (way, leg, tokens) until None; answers each with what it took,
    in seconds: of a core for a handoff, else of time."""
    kv = Kv(setting, seed=2)
    geometry = setting.geometry
    made = TorchDevice(kv.device)
    memory = made(setting.pages * geometry.page_bytes)
    alone = Alone("alone-d", memory)
    end = open_receiver(
        opening(geometry, key, Transport.NIXL), os.environ, CounterBoard(), report, device=made
    )
    orders.send((alone.reach.card(), (alone.address, alone.index)))
    card, theirs = orders.recv()
    peer = alone.met(card)
    orders.send("ready")
    while (order := orders.recv()) is not None:
        way, leg, tokens = order
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        pages = geometry.pages_for(tokens)
        size = pages * geometry.page_bytes
        if way == "handoff":
            inbound = end.fetch(leg, range(tokens), Sink(kv))
            inbound.settled.wait(TIMEOUT_S)
            orders.send(time.process_time() - began_cpu_s)
            continue
        if way == "digest":
            orders.send(kv.digest(tokens))
            continue
        if way == "scatter":
            piece = Piece(0, 0, geometry.layers, Run(memory, 0, size), pages)
            kv.slots.write_from([kv.part(piece, tokens)])
            kv.slots.flush()
        else:
            alone.move("READ", peer, theirs, geometry.page_bytes, size)
        orders.send(time.perf_counter() - began_s)
    end.close()
    kv.slots.close()
    alone.reach.close()
