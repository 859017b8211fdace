"""The transfer alone: handoffs between two devices' KV memory, beside NIXL alone and a copy.

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
On a host (`--device host`) its memory stands for a device's, and chunks of pages for layers.

Needs torch, triton and NIXL: run it with a vLLM or SGLang environment's Python.

    PYTHON bench/gpu_transfer.py [--shapes 0.5b,7b] [--lens 744,2844,8000] [--devices 0,1]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from data_plane import DIGEST, KEY, TIMEOUT_S, WARM_UPS, report
from gpu_budget import Budget
from gpu_report import closing, grid, write
from gpu_shapes import SHAPES
from gpu_transfer_ends import Kv, Setting, opening, receive
from nixl_plane import Alone

from pdctl.engines.device import TorchDevice
from pdctl.engines.interface import Leg
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.device import Run
from pdctl.handoff.opening import open_sender
from pdctl.handoff.outbound import Outbound
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.ticket import mint

HERE = Path(__file__).resolve().parent
WAYS = ("handoff", "computed", "plain read", "plain write", "peer copy", "gather", "scatter")
HANDOFFS = ("handoff", "computed")
TARGET_OF_PLAIN_WRITE = 0.8
START_S = 120.0
"""What a process with a device may take until it is ready."""
PACKAGES = ("torch", "triton", "nixl", "nixl-cu12", "nixl-cu13", "numpy")


def geometry_of(shape: str) -> PageGeometry:
    config = SHAPES[shape]
    dim = config["hidden_size"] // config["num_attention_heads"]
    return PageGeometry(config["num_hidden_layers"], config["num_key_value_heads"], dim)


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
            opening(geometry, KEY, sends=True, buffer_bytes=2 * size),
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
        room = secrets.randbits(62)
        leg = Leg(
            room=room,
            ticket=mint(KEY, room, "p0", "d0", DIGEST, time.time() + TIMEOUT_S),
            prefill="p0",
            decode="d0",
            sender=f"127.0.0.1:{self.port}",
            timeout_s=TIMEOUT_S,
        )
        reserved = threading.Event()
        outbound = self.sender.admit(
            leg,
            range(tokens),
            on_reserved=lambda outbound: reserved.set(),
            on_settled=lambda outbound: None,
        )
        assert reserved.wait(TIMEOUT_S)
        return outbound, leg


def timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


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
    shape: str, options: argparse.Namespace, devices: tuple[str, str], budget: Budget
) -> list[dict[str, Any]]:
    bench = Bench(geometry_of(shape), max(options.lens), devices)
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


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="0.5b,7b")
    parser.add_argument("--lens", default="744,2844,8000", help="tokens of the prompts")
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument(
        "--devices", default="0", help="prefill is on the first, decode on the last"
    )
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--budget-s", type=float, default=90.0)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.set_defaults(engines=[], graphs=False)
    options = parser.parse_args()
    options.shapes = options.shapes.split(",")
    options.lens = [int(tokens) for tokens in options.lens.split(",")]
    options.devices = [int(number) for number in options.devices.split(",")]
    return options


def main() -> int:
    options = parsed()
    ends = (options.devices[0], options.devices[-1])
    devices = ("cpu", "cpu")
    if options.device == "cuda":
        devices = (f"cuda:{ends[0]}", f"cuda:{ends[1]}")
    budget = Budget(options.budget_s)
    variant = "host" if options.device == "host" else f"{len(set(ends))}-gpu"
    found: dict[str, list[dict[str, Any]]] = {}
    lines: list[str] = []
    for shape in options.shapes:
        if not budget.allows(f"shape {shape}", 10.0):
            continue
        found[shape] = shape_of(shape, options, devices, budget)
        lines += table(shape, found[shape])
        told = {"packages": versions(), "target_of_plain_write": TARGET_OF_PLAIN_WRITE}
        whole = {**told, "results": found, "left_out": budget.left_out, "used_s": budget.used_s}
        write(
            "gpu_transfer",
            variant,
            __doc__ or "",
            options,
            whole,
            [*lines, *closing(budget.left_out, {})],
        )
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
