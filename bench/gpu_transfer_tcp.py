"""Handoffs between two devices' KV memory over TCP, beside their copies and plain copies.

Two processes, prefill's memory on the first device named and decode's on the last, pages and pieces
in page-locked memory, pdctl's own ends, each once apart (a process beside the engine's, as engines
have it) and once inside; by turns:

- landed: all layers of a prompt are in the pages before. From the order to fetch until Done.
- by layer: decode has granted, and a forward begins which takes `layer_ms` for each layer: so much
  of 8000 tokens, less of fewer in proportion. Groups of layers are gathered as in an engine. From
  the forward's begin until Done; `after_last_ms` from when the last layers were there;
  `sustained_gb_per_s` from when the first were.
- plain, hashed and framed copies of the pieces that a landed handoff had, and one by layer: sent
  from where they lie, received into buffers by turns; hashed: with checksums at both ends; framed:
  through pdctl's `Link`, without a handoff around it.
- gather: of the whole prompt into page-locked pages, waited for.
- scatter: the same pieces out of page-locked memory, waited for.

Clocks run in the process that begins; `ms` are medians. `cpu_ms` is what a way takes of a core, a
mean, by thread and process: the sending thread; the receiving one, with the one that answers the
offer; the engine's that computes; the sink's placing; where the data plane is apart, the thread
that hands pieces on to the sink (landing). Inside, the receiving thread places. Before it is
measured, each handoff's bits are compared.
On a host the pages are filled before, and groups of layers are there at their time by themselves.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import defaultdict
from typing import Any

from data_plane import KEY, TIMEOUT_S, report
from gpu_budget import Budget
from gpu_transfer_cpu import used
from gpu_transfer_ends import START_S, Setting, leg_to, opening, timed
from gpu_transfer_tcp_ends import (
    Landed,
    PieceKv,
    Shown,
    Took,
    admitted,
    apart_common,
    compute,
    memory_of,
    receive,
)
from gpu_transfer_tcp_tables import (
    COPY_WAYS,
    HANDOFFS,
    SCATTERS,
    WAYS,
    Taken,
    parts,
    summary,
    table,
)
from piece_copies import Copies, Spot, listening

from pdctl.engines.sglang.cuda import Span
from pdctl.handoff.apart.sending import ApartSender
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.opening import open_sender
from pdctl.handoff.page import PageGeometry
from pdctl.topology.model import Transport

__all__ = ["METHOD", "TOLD", "shape_of", "table"]

METHOD = __doc__ or ""
LAYER_MS = {"0.5b": 1.0, "7b": 8.0, "tiny": 1.0}
LAYER_TOKENS = 8000
WARM_UPS = 2
LEAST = 3
TOLD = {"layer_tokens": LAYER_TOKENS}


class Bench:
    """The sending process, with the receiving one."""

    def __init__(
        self, geometry: PageGeometry, tokens: int, devices: tuple[str, str], layer_ms: float
    ) -> None:
        self.geometry = geometry
        self.layer_ms = layer_ms
        setting = Setting(geometry, tokens, devices[0])
        self.kv = PieceKv(setting, seed=1)
        size = setting.pages * geometry.page_bytes
        self.pages = memory_of(self.kv)(size)
        self.spots: dict[str, list[Spot]] = {}
        opened = opening(geometry, KEY, Transport.TCP, buffer_bytes=2 * size)
        memory = self.kv.slots.page_memory
        board = CounterBoard()
        self.senders: dict[str, Any] = {
            "apart": ApartSender(opened, **apart_common(self.kv.slots.lock)),
            "inside": open_sender(opened, os.environ, board, report, memory=memory),
        }
        self.ports = {place: sender.start() for place, sender in self.senders.items()}
        self.shown = None if self.kv.slots.leaves_by_layer else Shown(geometry)
        context = multiprocessing.get_context("spawn")
        self.orders, theirs = context.Pipe()
        with listening() as listener:
            there = setting._replace(device=devices[1])
            arguments = (theirs, KEY, there, listener.getsockname()[1])
            self.child = context.Process(target=receive, args=arguments)
            self.child.start()
            listener.settimeout(START_S)
            self.copies = Copies(listener.accept()[0], geometry)
        if not self.orders.poll(START_S):
            raise RuntimeError("the receiving process did not start")
        assert self.orders.recv() == "ready"

    def close(self) -> None:
        self.orders.send(None)
        self.child.join(TIMEOUT_S)
        for sender in self.senders.values():
            sender.close()
        if self.shown is not None:
            self.shown.close()
        self.kv.slots.close()
        self.copies.close()

    def check(self, tokens: int) -> None:
        """Raises ValueError where a handoff does not bring what the sender has; from then on it
        is known of which pieces each kind of them is made."""
        self._whole(tokens)
        for way in HANDOFFS:
            self._handoff(way, tokens)
            if self._asked("digest", tokens) != self.kv.digest(tokens):
                raise ValueError(f"{way}: {tokens} tokens are not what was handed over")

    def take(self, way: str, tokens: int) -> Taken:
        if way in HANDOFFS:
            return self._handoff(way, tokens)
        if way in COPY_WAYS:
            return self._copy(*COPY_WAYS[way])
        if way == "gather":
            began_s = time.thread_time()
            took_s = timed(lambda: self._whole(tokens))
            return Taken(took_s, {"engine thread": time.thread_time() - began_s}, [])
        spots = self.spots[SCATTERS[way]]
        took_s, cpu_s = self._asked("scatter", tokens, spots)
        return Taken(took_s, {"placing": cpu_s}, spots)

    def layer_s(self, tokens: int) -> float:
        return self.layer_ms / 1e3 * tokens / LAYER_TOKENS

    def _whole(self, tokens: int) -> None:
        size = self.geometry.pages_for(tokens) * self.geometry.page_bytes
        self.kv.gather(tokens, self.geometry.over(self.pages[:size], tokens))

    def _asked(self, *order: object) -> Any:
        self.orders.send(order)
        return self.orders.recv()

    def _copy(self, kind: str, landing: str) -> Taken:
        spots = self.spots[landing]
        assert self._asked("copy", kind, spots) == "begun"
        began_cpu_s = time.thread_time()
        began_s = time.perf_counter()
        self.copies.send(kind, spots, self.pages)
        took_s = time.perf_counter() - began_s
        sending_s = time.thread_time() - began_cpu_s
        return Taken(took_s, {"sending": sending_s, "receiving": self.orders.recv()}, spots)

    def _handoff(self, way: str, tokens: int) -> Taken:
        landing, place = HANDOFFS[way]
        leg = leg_to(self.ports[place])
        outbound = admitted(self.senders[place], leg, tokens)
        if landing == "landed" or self.shown is not None:
            self.kv.gather(tokens, outbound.pages())
        landed, late = Landed(outbound, tokens), 0
        plane = getattr(self.senders[place], "pid", None)
        self._asked("begin", place)
        before, plane_before = used(), used(plane) if plane else None
        began_s = time.perf_counter()
        if landing == "landed":
            landed.told(self.geometry.layers)
        assert self._asked("handoff", place, leg, tokens) == "offered"
        if landing == "by layer":
            began_s = time.perf_counter()
            span = Span(0, 0, tokens, outbound.pages())
            memory = self.shown or self.kv.slots
            late = compute(memory, self.geometry, landed, span, self.layer_s(tokens))
        outbound.finish(0)
        assert outbound.settled.wait(TIMEOUT_S)
        done_s = time.perf_counter()
        engine = used().since(before)
        spent = used(plane).since(plane_before) if plane_before else None
        if outbound.error is not None:
            raise outbound.error
        there: Took = self.orders.recv()
        self.spots[landing] = there.spots
        return Taken(
            done_s - began_s,
            parts(engine, spent, there),
            there.spots,
            done_s - landed.last_s if landing == "by layer" else None,
            done_s - landed.first_s if landing == "by layer" else None,
            late,
        )


def measured(bench: Bench, tokens: int, repetitions: int, budget: Budget) -> dict[str, Any]:
    """One length. It is told how often each way was taken: fewer where time ran out."""
    bench.check(tokens)
    taken: dict[str, list[Taken]] = defaultdict(list)
    for at in range(WARM_UPS + repetitions):
        if at >= WARM_UPS + LEAST and not budget.left_s:
            break
        for way in WAYS[at % len(WAYS) :] + WAYS[: at % len(WAYS)]:
            once = bench.take(way, tokens)
            if at >= WARM_UPS:
                taken[way].append(once)
    return {
        "tokens": tokens,
        "bytes": bench.geometry.pages_for(tokens) * bench.geometry.page_bytes,
        "layer_ms": round(bench.layer_s(tokens) * 1e3, 3),
        "repetitions": len(taken["gather"]),
        "ways": {way: summary(taken[way], bench.geometry, tokens) for way in WAYS},
    }


def shape_of(
    shape: str,
    geometry: PageGeometry,
    options: argparse.Namespace,
    devices: tuple[str, str],
    budget: Budget,
) -> list[dict[str, Any]]:
    layer_ms = LAYER_MS[shape] if options.layer_ms is None else options.layer_ms
    bench = Bench(geometry, max(options.lens), devices, layer_ms)
    try:
        # a longer prompt takes longer: each gets its share of what is left
        return [
            measured(bench, tokens, options.repetitions, budget.part(tokens / sum(lens)))
            for lens in (options.lens[at:] for at in range(len(options.lens)))
            for tokens in lens[:1]
            if budget.allows(f"{shape} at {tokens}")
        ]
    finally:
        bench.close()
