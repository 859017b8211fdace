"""What `gpu_transfer_tcp.py` measures between: an engine's end of handoffs over TCP, in its own
process and apart, and its placing of pieces."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from data_plane import TIMEOUT_S, report
from gpu_transfer_cpu import Spent, used
from gpu_transfer_ends import Kv, Setting, Sink, opening, timed
from numpy.typing import NDArray
from piece_copies import Copies, Spot

from pdctl.engines.cuda.kernel import Tokens
from pdctl.engines.cuda.reading import Reader
from pdctl.engines.sglang.cuda import Span
from pdctl.errors import HandoffError
from pdctl.handoff.apart.receives import PIECES
from pdctl.handoff.apart.receiving import ApartReceiver
from pdctl.handoff.arena import Bytes
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.opening import open_receiver
from pdctl.handoff.page import PATTERN, PageGeometry, Patterns
from pdctl.handoff.schedule import PIECE_BYTES
from pdctl.handoff.seam import Outgoing, ReceivingEnd
from pdctl.handoff.sink import Want
from pdctl.topology.model import PAGE_TOKENS, Transport

PLACES = ("apart", "inside")
Memory = Callable[[int], Bytes]


def apart_common(lock: Callable[[Bytes], None] | None) -> Any:
    """As `ApartCommon`. On a host too the last pieces are held, as a GPU's copies want it."""

    def lost(error: HandoffError) -> None:
        report(0, error.cause, error.message)

    lock = lock or (lambda memory: None)
    return {"lock": lock, "board": CounterBoard(), "on_failed": report, "on_lost": lost}


def memory_of(kv: Kv) -> Memory:
    """What its copies want pages and pieces to lie in."""
    made: Memory | None = kv.slots.page_memory
    return made or (lambda size: np.zeros(size, np.uint8))


class Shown:
    """In a GPU's place where there is none: pages were filled before, and layers land the moment
    that they are enqueued, in a GPU's groups."""

    def __init__(self, geometry: PageGeometry) -> None:
        # it stands for the kernel, the stream and its marks
        stand_in = cast(Any, self)
        self._reader = Reader(stand_in, stand_in, geometry)
        self.gather = self._reader.gather
        self.close = self._reader.close

    def begin_step(self, spans: Sequence[Span]) -> None:
        (span,) = spans
        rows = cast(Any, range(span.start, span.stop))
        self._reader.begin(Tokens(rows, rows), span.pages)

    def after_model(self, work: Callable[[], None]) -> Shown:
        work()
        return self

    def to_pages(self, *_: object, **__: object) -> None:
        return

    def hold_model(self, mark: object) -> None:
        return

    def synchronize(self) -> None:
        return


class Landed:
    """When an outbound's first layers and its last were there."""

    def __init__(self, outbound: Outgoing, tokens: int) -> None:
        self._outbound, self._tokens = outbound, tokens
        self.first_s = self.last_s = 0.0

    def told(self, layers: int) -> None:
        self.last_s = time.perf_counter()
        self.first_s = self.first_s or self.last_s
        self._outbound.written(self._tokens, layers=layers)


def compute(memory: Any, geometry: PageGeometry, landed: Landed, span: Span, layer_s: float) -> int:
    """As a forward that takes so long for each layer; how many of them were late."""
    late = 0
    memory.begin_step([span])
    began_s = time.perf_counter()
    for layer in range(geometry.layers):
        ahead_s = began_s + (layer + 1) * layer_s - time.perf_counter()
        late += ahead_s < 0
        time.sleep(max(0.0, ahead_s))
        memory.gather(layer, lambda at=layer + 1: landed.told(at))
    return late


class Took(NamedTuple):
    """Of a handoff, on decode's side."""

    spots: list[Spot]
    placing_s: float
    """Of a core, inside the sink."""
    engine: Spent
    plane: Spent | None
    """None where it is inside."""


class PieceSink(Sink):
    """Places piece by piece, and counts."""

    def __init__(self, kv: Kv, told: Callable[[], None]) -> None:
        super().__init__(kv)
        self._told = told
        self.spots: list[Spot] = []
        self.placing_s = 0.0

    def offered(self, tokens: int, deadline: float) -> Want:
        self._told()
        return super().offered(tokens, deadline)

    def write(self, page: int, first_layer: int, piece: Patterns) -> None:
        began_s = time.thread_time()
        if not self.spots:
            self._kv.bind()
        spot = Spot(page, first_layer, len(piece))
        self._kv.place(spot, self._tokens, piece)
        self.spots.append(spot)
        self.placing_s += time.thread_time() - began_s

    def commit(self, first_token: int | None) -> None:
        began_s = time.thread_time()
        super().commit(first_token)
        self.placing_s += time.thread_time() - began_s


class PieceKv(Kv):
    def __init__(self, setting: Setting, seed: int) -> None:
        # others would spin after each copy on a host, and be counted
        torch.set_num_threads(1)
        super().__init__(setting, seed)

    def place(self, spot: Spot, tokens: int, piece: Patterns) -> None:
        slots = range(min(PAGE_TOKENS, tokens - spot.page * PAGE_TOKENS))
        self.slots.write(self.blocks[spot.page], slots, spot.first_layer, piece)


class Decode:
    """The receiving process."""

    def __init__(self, orders: Connection, key: bytes, setting: Setting, port: int) -> None:
        self.kv = PieceKv(setting, seed=2)
        self._geometry = geometry = setting.geometry
        self._orders = orders
        opened = opening(geometry, key, Transport.TCP)
        memory = self.kv.slots.page_memory
        self._ends: dict[str, ReceivingEnd] = {
            "apart": ApartReceiver(opened, **apart_common(self.kv.slots.lock)),
            "inside": open_receiver(opened, os.environ, CounterBoard(), report, memory=memory),
        }
        for end in self._ends.values():
            end.start()
        connected = socket.create_connection(("127.0.0.1", port))
        self._copies = Copies(connected, geometry)
        size = max(PIECE_BYTES, geometry.layer_bytes)
        self._pieces = [memory_of(self.kv)(size) for _ in range(PIECES)]

    def close(self) -> None:
        for end in self._ends.values():
            end.close()
        self._copies.close()
        self.kv.slots.close()

    def begin(self, place: str) -> None:
        """Looks at what was used before the next handoff, which takes time."""
        self._plane: int | None = getattr(self._ends[place], "pid", None)
        self._before = used(), used(self._plane) if self._plane else None

    def handoff(self, place: str, leg: Any, tokens: int) -> Took:
        sink = PieceSink(self.kv, lambda: self._orders.send("offered"))
        self._ends[place].fetch(leg, range(tokens), sink).settled.wait(TIMEOUT_S)
        engine_before, plane_before = self._before
        engine = used().since(engine_before)
        spent = used(self._plane).since(plane_before) if plane_before else None
        return Took(sink.spots, sink.placing_s, engine, spent)

    def digest(self, tokens: int) -> str:
        """Of what it has; it has nothing after that."""
        found = self.kv.digest(tokens)
        self.kv.clear()
        return found

    def copy(self, kind: str, spots: Sequence[Spot]) -> float:
        """Seconds of a core."""
        self._orders.send("begun")
        began_s = time.thread_time()
        self._copies.receive(kind, spots)
        return time.thread_time() - began_s

    def scatter(self, tokens: int, spots: Sequence[Spot]) -> tuple[float, float]:
        """Seconds, and seconds of a core."""
        began_cpu_s = time.thread_time()
        took_s = timed(lambda: self._scatter(tokens, spots))
        return took_s, time.thread_time() - began_cpu_s

    def _scatter(self, tokens: int, spots: Sequence[Spot]) -> None:
        for at, spot in enumerate(spots):
            self.kv.place(spot, tokens, self._piece(at, spot))
        self.kv.slots.flush()

    def _piece(self, at: int, spot: Spot) -> NDArray[np.uint16]:
        _, size = spot.bytes(self._geometry)
        shape = (spot.layers, *self._geometry.shape[1:])
        return self._pieces[at % PIECES][:size].view(PATTERN).reshape(shape)


def receive(orders: Connection, key: bytes, setting: Setting, port: int) -> None:
    """The receiving process' main thread: obeys (name of a method, its arguments) until None."""
    decode = Decode(orders, key, setting, port)
    orders.send("ready")
    while (order := orders.recv()) is not None:
        name, *arguments = order
        orders.send(getattr(decode, name)(*arguments))
    decode.close()


def admitted(sender: Any, leg: Any, tokens: int) -> Outgoing:
    """Its pages are there."""
    reserved = threading.Event()
    outbound: Outgoing = sender.admit(
        leg,
        range(tokens),
        on_reserved=lambda outbound: reserved.set(),
        on_settled=lambda outbound: None,
    )
    assert reserved.wait(TIMEOUT_S)
    return outbound
