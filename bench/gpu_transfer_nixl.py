"""Handoffs between two devices' KV memory over NIXL, beside NIXL alone and a copy.

Two processes, prefill's memory on the first device named and decode's on the last, and by turns:

- handoff: a prompt that stands in the blocks, through pdctl's own ends: gathered into pages group
  by group, as a forward has its layers leave, read through NIXL and scattered into blocks
  meanwhile. From the first gather until Done.
- computed: the same with pages that are filled already.
- plain read, plain write: NIXL alone, as many bytes, one request, one row a page.
- peer copy: torch's `copy_` of as many bytes between the devices.
- gather, scatter: those copies alone, of the whole prompt, waited for.

Clocks run in the process that begins; figures are medians. `cpu_ms` is what a handoff takes of a
core in each process, all threads together. Before it is measured, a handoff's bits are compared.
On a host its memory stands for a device's, and chunks of pages for layers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import threading
import time
from typing import Any

import torch
from data_plane import KEY, TIMEOUT_S, WARM_UPS, report
from gpu_budget import Budget
from gpu_report import grid
from gpu_transfer_ends import START_S, Kv, Setting, leg_to, opening, receive, timed
from nixl_plane import Alone

from pdctl.engines.device import TorchDevice
from pdctl.engines.interface import Leg
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.device import Run
from pdctl.handoff.opening import open_sender
from pdctl.handoff.outbound import Outbound
from pdctl.handoff.page import PageGeometry
from pdctl.topology.model import Transport

METHOD = __doc__ or ""
WAYS = ("handoff", "computed", "plain read", "plain write", "peer copy", "gather", "scatter")
HANDOFFS = ("handoff", "computed")
TARGET_OF_PLAIN_WRITE = 0.8
TOLD = {"target_of_plain_write": TARGET_OF_PLAIN_WRITE}


class Bench:
    """The sending process, with the receiving one."""

    def __init__(self, geometry: PageGeometry, tokens: int, devices: tuple[str, str]) -> None:
        self.geometry = geometry
        setting = Setting(geometry, tokens, devices[0])
        size = setting.pages * geometry.page_bytes
        self.kv = Kv(setting, seed=1)
        made = TorchDevice(self.kv.device)
        self.pages = made(size)
        self.alone = Alone("alone-p", self.pages)
        self.board = CounterBoard()
        self.sender = open_sender(
            opening(geometry, KEY, Transport.NIXL, buffer_bytes=2 * size),
            os.environ,
            self.board,
            report,
            device=made,
        )
        self.port = self.sender.start()
        self.copied = torch.empty(size, dtype=torch.uint8, device=devices[1])
        self.cpu_s: dict[str, list[float]] = {"prefill": [], "decode": []}
        context = multiprocessing.get_context("spawn")
        self.orders, theirs = context.Pipe()
        there = setting._replace(device=devices[1])
        self.child = context.Process(target=receive, args=(theirs, KEY, there))
        self.child.start()
        if not self.orders.poll(START_S):
            raise RuntimeError("the receiving process did not start")
        card, self.theirs = self.orders.recv()
        self.orders.send((self.alone.reach.card(), (self.alone.address, self.alone.index)))
        self.peer = self.alone.met(card)
        assert self.orders.recv() == "ready"

    def close(self) -> None:
        self.orders.send(None)
        self.child.join(TIMEOUT_S)
        self.sender.close()
        self.kv.slots.close()
        self.alone.reach.close()

    def seconds(self, way: str, tokens: int) -> float:
        if way in HANDOFFS:
            return self._handoff_s(tokens, computed=way == "computed")
        if way in ("scatter", "plain read"):
            return float(self._asked(way, None, tokens))
        page = self.geometry.page_bytes
        size = self.geometry.pages_for(tokens) * page
        if way == "plain write":
            return timed(lambda: self.alone.move("WRITE", self.peer, self.theirs, page, size))
        if way == "gather":
            return timed(lambda: self.kv.gather(tokens, Run(self.pages, 0, size)))
        return timed(lambda: self._peer_copy(size))

    def check(self, tokens: int) -> None:
        """Raises ValueError where a handoff does not bring what the sender has."""
        self._handoff_s(tokens, computed=False)
        if self._asked("digest", None, tokens) != self.kv.digest(tokens):
            raise ValueError(f"{tokens} tokens are not what was handed over")
        for each in self.cpu_s.values():
            each.clear()

    def _asked(self, *order: object) -> Any:
        self.orders.send(order)
        return self.orders.recv()

    def _peer_copy(self, size: int) -> None:
        self.copied[:size].copy_(self.pages.tensor[:size])
        if self.copied.is_cuda:
            for device in (self.kv.device, self.copied.device):
                torch.cuda.synchronize(device)

    def _handoff_s(self, tokens: int, *, computed: bool) -> float:
        outbound, leg = self._admitted(tokens)
        if computed:
            self.kv.gather(tokens, outbound.pages())
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        self.orders.send(("handoff", leg, tokens))
        if computed:
            outbound.written(tokens)
        else:
            self.kv.bring(outbound, tokens)
        outbound.finish(0)
        assert outbound.settled.wait(TIMEOUT_S)
        took_s = time.perf_counter() - began_s
        if outbound.error is not None:
            raise outbound.error
        if not computed:
            self.cpu_s["prefill"].append(time.process_time() - began_cpu_s)
        there_s = self.orders.recv()
        if not computed:
            self.cpu_s["decode"].append(there_s)
        return took_s

    def _admitted(self, tokens: int) -> tuple[Outbound, Leg]:
        leg = leg_to(self.port)
        reserved = threading.Event()
        outbound = self.sender.admit(
            leg,
            range(tokens),
            on_reserved=lambda outbound: reserved.set(),
            on_settled=lambda outbound: None,
        )
        assert reserved.wait(TIMEOUT_S)
        return outbound, leg


def measured(bench: Bench, tokens: int, repetitions: int, budget: Budget) -> dict[str, Any]:
    """One length. It is told how often each way was taken: fewer where time ran out."""
    bench.check(tokens)
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    for at in range(WARM_UPS + repetitions):
        if at > WARM_UPS + 2 and not budget.left_s:
            break
        for way in WAYS[at % len(WAYS) :] + WAYS[: at % len(WAYS)]:
            taken_s = bench.seconds(way, tokens)
            if at >= WARM_UPS:
                samples[way].append(taken_s)
    size = bench.geometry.pages_for(tokens) * bench.geometry.page_bytes
    medians = {way: statistics.median(each) for way, each in samples.items()}
    return {
        "tokens": tokens,
        "bytes": size,
        "repetitions": len(samples["handoff"]),
        "ms": {way: round(each * 1e3, 3) for way, each in medians.items()},
        "gb_per_s": {way: round(size / each / 1e9, 2) for way, each in medians.items()},
        "to_plain_write": round(medians["plain write"] / medians["handoff"], 3),
        "cpu_ms": {end: round(statistics.median(s) * 1e3, 2) for end, s in bench.cpu_s.items()},
        "host_bytes": bench.board.read().host_bytes,
        "samples_ms": {way: [round(s * 1e3, 3) for s in each] for way, each in samples.items()},
    }


def shape_of(
    shape: str,
    geometry: PageGeometry,
    options: argparse.Namespace,
    devices: tuple[str, str],
    budget: Budget,
) -> list[dict[str, Any]]:
    bench = Bench(geometry, max(options.lens), devices)
    try:
        return [
            measured(bench, tokens, options.repetitions, budget)
            for tokens in options.lens
            if budget.allows(f"{shape} at {tokens}")
        ]
    finally:
        bench.close()


def table(shape: str, results: list[dict[str, Any]]) -> list[str]:
    """Milliseconds, and in brackets GB/s."""
    heads = [f"{each['tokens']} tokens" for each in results]
    rows = {
        way: [f"{each['ms'][way]:.2f} ({each['gb_per_s'][way]:.1f})" for each in results]
        for way in WAYS
    }
    rows["handoff ÷ plain write"] = [f"{each['to_plain_write']:.2f}" for each in results]
    for end in ("prefill", "decode"):
        rows[f"{end}, ms of a core"] = [f"{each['cpu_ms'][end]:.2f}" for each in results]
    return [f"{shape} shape, ms (GB/s), medians", "", *grid("way", heads, rows), ""]
