"""Throughput and time to the first token under load: prompts of mixed lengths, several at once.

Systems, each of its own processes:

    ordinary    each engine's own server without any connector, one of it, and two by turns ("x2"):
                a pair beside them is no gain if two ordinary ones do as well
    native      vLLM's and SGLang's own handoff over NIXL, in clusters of transport = "native"
    tcp, nixl   pdctl's pairs of one cluster of all engines asked for, over that transport

Each takes the same prompts in the same order, of the lengths by turns, from as many clients as
stand in --concurrency, each of which asks again as soon as it is answered; one way after another,
in rounds. TTFT is the time to the first chunk with text. Output tokens/s are those of all answers
over the time from the first request to the last answer. KV pools and batches are equal. All
systems are up at the same time, idle but for one; "/" in --systems parts them, where a machine
has not the memory or the cores.

    python bench/gpu_load.py --vllm-python PYTHON --sglang-python PYTHON --tokenizer CHECKPOINT \\
        --graphs --systems ordinary,native,tcp,nixl

Seconds on one H200 with 16 cores, 0.5b with graphs: up 170 for sixteen replicas; a way's round of
128 requests 4 at 16 clients, 3 at 32, of 32 requests 4 at one; eager four times as long.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from gpu_budget import Budget
from gpu_clients import Turns, load, prompts_of
from gpu_cluster import Fleet, System, fleet, members
from gpu_engines import Server, Site, ordinary
from gpu_options import UP_SHARE, each_shape, parser_of, site_of, split, to_be_up_s
from gpu_report import closing, grid, write
from gpu_targets import targets
from gpu_ways import Direct, Named, Routed, Way

from pdctl.runtime.bench.client import Client
from pdctl.runtime.bench.columns import columns
from pdctl.runtime.bench.prompts import Prompt, PromptSource
from pdctl.topology.model import Engine

SYSTEMS = ("ordinary", "native", "tcp", "nixl")
NIXL_ENGINES = ("vllm", "sglang")
UP_S = 150.0
WARM_UP_LANES = 4
COUNTED = ("host_bytes", "gpu_bytes", "handoffs_completed", "handoffs_failed")
RUN = os.getpid()


Found = dict[str, dict[int, list[dict[str, Any]]]]
"""By way and clients: the figures of each round."""


def systems(names: Sequence[str], engines: Sequence[str]) -> Iterator[System]:
    for name in names:
        if name == "native":
            for engine in (e for e in engines if e in NIXL_ENGINES):
                pair = members(f"{engine[0]}p {engine[0]}d")
                yield System(f"native-{engine}-{RUN}", pair, transport=name)
        elif name in ("tcp", "nixl"):
            having = [e for e in engines if name == "tcp" or e in NIXL_ENGINES]
            both = members(" ".join(f"{e[0]}p {e[0]}d" for e in having))
            yield System(f"{name}-{RUN}", both, transport=name)


def servers(site: Site, names: Sequence[str], engines: Sequence[str]) -> Iterator[Server]:
    if "ordinary" in names:
        for engine in engines:
            yield ordinary(site, engine)
            there = replace(site, logs=site.logs / "second", devices=site.devices[-1:])
            second = ordinary(there, engine)
            second.name = f"{engine} second"
            yield second


def ways(started: Fleet) -> Iterator[Way]:
    up = started.servers
    for name, server in up.items():
        if " " in name:
            continue
        one = Direct(f"ordinary {name}", Engine(name), server.url, server.model)
        yield one
        if second := up.get(f"{name} second"):
            two = Direct(second.name, Engine(name), second.url, second.model)
            yield Turns(f"ordinary {name} x2", (one, two))
    for name, target in started.targets.items():
        for column in columns(target.plan):
            if column.is_pair and column.path != "mp>md":
                kind = name.partition("-")[0]
                yield Named(f"{column.path} {kind}", Routed(target, column, counted=False))


async def counters(started: Fleet, way: Way) -> dict[str, int]:
    """Of the pair, as its router has them; nothing of what has no router."""
    path, _, kind = way.name.partition(" ")
    engine = {"v": "vllm", "s": "sglang"}.get(path[0], "")
    names = (f"{kind}-{RUN}", f"{kind}-{engine}-{RUN}")
    target = next((started.targets[n] for n in names if n in started.targets), None)
    if ">" not in path or target is None:
        return {}
    async with aiohttp.ClientSession() as session:
        client = Client(session, target.url, timeout_s=10.0, headers=target.headers)
        pair = (await client.status()).pairs.get(path, {})
    return {name: int(pair.get(name) or 0) for name in COUNTED}


class Run:
    """One shape's."""

    def __init__(self, options: argparse.Namespace, budget: Budget, shape: str, logs: Path) -> None:
        self._options, self._budget, self._shape = options, budget, shape
        self._site = site_of(options, shape, logs)
        (logs / "second").mkdir(exist_ok=True)
        self._source = PromptSource.of_checkpoint(self._site.model, seed=0)
        self._seen_s: dict[tuple[str, int], float] = {}
        self._found: Found = {}
        self._failed: dict[str, str] = {}
        self._up_s: list[float] = []

    def measure(self) -> None:
        options, budget = self._options, self._budget
        waves = options.systems
        for number, names in enumerate(waves):
            up_s = to_be_up_s(options, UP_S)
            if not budget.allows(" and ".join(names), up_s):
                continue
            some = budget.part(1 / (len(waves) - number))
            wanted = list(systems(names, options.engines))
            beside = list(servers(self._site, names, options.engines))
            with fleet(self._site, wanted, beside, some.left_s * UP_SHARE) as started:
                self._failed |= started.failed
                self._up_s.append(round(started.up_s, 1))
                try:
                    asyncio.run(self.rounds(started, some))
                finally:
                    self.write()

    async def rounds(self, started: Fleet, budget: Budget) -> None:
        asked = list(ways(started))
        lens = self._options.lens
        for way in asked:
            warm = prompts_of(self._source, lens, 2 * len(lens), f"warm/{way.name}")
            await load(way, warm, WARM_UP_LANES, self._options.output_len, f"warm/{way.name}")
        for turn, clients in itertools.product(
            range(self._options.rounds), self._options.concurrency
        ):
            count = self._options.lone_requests if clients == 1 else self._options.requests
            prompts = prompts_of(self._source, lens, count, f"{turn}/{clients}/{time.time_ns()}")
            for way in (*asked[turn % len(asked) :], *asked[: turn % len(asked)]):
                await self._cell(started, way, prompts, clients, turn, budget)

    async def _cell(
        self,
        started: Fleet,
        way: Way,
        prompts: Sequence[Prompt],
        clients: int,
        turn: int,
        budget: Budget,
    ) -> None:
        cell = f"{way.name} at {clients}, round {turn + 1}"
        if not budget.allows(cell, self._seen_s.get((way.name, clients), 0.0)):
            return
        if any(each.get("failed") == len(prompts) for each in self._figures(way.name, clients)):
            return
        before = await counters(started, way)
        given = await load(way, prompts, clients, self._options.output_len, cell)
        after = await counters(started, way)
        moved = {name: count - before[name] for name, count in after.items()}
        figures = replace(given, moved=moved).figures()
        self._seen_s[way.name, clients] = given.took_s
        self._figures(way.name, clients).append(figures)
        print(f"{cell}: {figures}, {budget.left_s:.0f} s left", flush=True)

    def _figures(self, way: str, clients: int) -> list[dict[str, Any]]:
        return self._found.setdefault(way, {}).setdefault(clients, [])

    def write(self) -> None:
        options, left_out = self._options, self._budget.left_out
        held = targets(self._found)
        measured = {
            "up_s": self._up_s,
            "ways": self._found,
            "targets": [{**each._asdict(), "met": each.met} for each in held],
            "left_out": left_out,
            "failed": self._failed,
        }
        lines = [*table(self._shape, self._found, options), "", *(f"- {each}" for each in held)]
        lines += closing(left_out, self._failed)
        variant = f"{self._shape}-{'-'.join(options.engines)}"
        write("gpu_load", variant, __doc__ or "", options, measured, lines)


def table(shape: str, found: Found, options: argparse.Namespace) -> list[str]:
    lanes = options.concurrency
    title = (
        f"{shape} shape, prompts of {', '.join(map(str, options.lens))} tokens by turns, "
        f"{options.output_len} output tokens, {options.requests} requests "
        f"({options.lone_requests} at one client): output tokens/s, "
        "TTFT p50 (p95) in ms, medians of rounds."
    )
    rows = {
        way: [_shown(by_clients.get(clients, [])) for clients in lanes]
        for way, by_clients in found.items()
    }
    return [title, "", *grid("way", [f"{clients} clients" for clients in lanes], rows)]


def _shown(rounds: Sequence[Mapping[str, Any]]) -> str:
    good = [each for each in rounds if "ttft_p50_ms" in each]
    if not good:
        return "failed" if rounds else "–"
    names = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p95_ms")
    rate, p50, tail = (statistics.median(each[name] for each in good) for name in names)
    failed = sum(each["failed"] for each in good)
    return f"{rate:.0f}, {p50:.0f} ({tail:.0f})" + (f", {failed} failed" if failed else "")


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(
        __doc__ or "", engines="vllm,sglang", lens="40,173,733,2833", context_length=8192
    )
    parser.add_argument("--systems", default="ordinary,native,tcp,nixl")
    parser.add_argument("--concurrency", default="16,32,1")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--lone-requests", type=int, default=32, help="at one client")
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    options = split(parser, words)
    options.systems = [wave.split(",") for wave in options.systems.split("/")]
    unknown = {name for wave in options.systems for name in wave} - set(SYSTEMS)
    if unknown:
        parser.error(f"no such system: {', '.join(sorted(unknown))}")
    options.concurrency = [int(n) for n in options.concurrency.split(",")]
    return options


def main() -> int:
    options = parsed()
    return each_shape(options, lambda *given: Run(options, *given).measure(), UP_S)


if __name__ == "__main__":
    sys.exit(main())
