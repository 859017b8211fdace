"""Prefixes shared between ordinary replicas, beside the engine's own cache and beside none.

Of each engine two clusters of two ordinary replicas run, one with a page store ("on"), one without
("off"). For each length documents that nobody has seen are asked for, straight at the replicas:

    none       off, the first replica: nothing of it is anywhere
    own        off, the same again: the engine's own prefix cache
    cold on    on, the first replica: computed, and stored
    store      on, the second replica, once the store has the pages: taken from there

`none` and `cold on` take turns at being first; what sharing costs a cold document is the median of
their differences within rounds, with its bootstrap interval, against 5 %. Conversations: 16
clients, each with a document of its own and further questions behind it, through the router, by
`policy = "round_robin"` and `"prefix"` in turn, with sharing off and on; `hit_rate` is the share of
the later turns' prompt tokens that no replica computed.

Conversations of the engines in --talking come first, then documents, length after length, engine
after engine; --parts takes one of the two.

    python bench/gpu_sharing.py --engines vllm,sglang,mlx --vllm-python PYTHON ... \\
        --tokenizer CHECKPOINT

Seconds on one H200 with 16 cores, 0.5b: up 130 for twelve replicas; a round of one engine 0.3 (1138
tokens) to 1.5 (16000 tokens); conversations of one engine four times 10.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from gpu_budget import Budget
from gpu_cluster import Fleet, System, fleet, members
from gpu_options import UP_SHARE, each_shape, parser_of, site_of, split
from gpu_paired import loss_of, said
from gpu_report import Cell, closing, grid, write
from gpu_turns import conversations
from gpu_ways import Direct, Taken, taken

from pdctl.runtime.bench.client import Client
from pdctl.runtime.bench.prompts import Prompt, PromptSource
from pdctl.runtime.bench.target import Target
from pdctl.topology.model import PAGE_TOKENS

STORE = {"cuda": "8GiB", "cpu": "256MiB", "host": "256MiB"}
COLD_BOUND, WARM_BOUND = 0.05, 1.3
PARTS = ("conversations", "documents")
POLICIES = ("round_robin", "prefix")
STORED_S = 10.0
POLL_S = 0.02
UP_S = 100.0
WARM_UPS = 1
WAYS = ("none", "own", "cold on", "store")
RUN = os.getpid()


def systems(engines: Sequence[str], store: str) -> list[System]:
    found = []
    for engine in engines:
        both = members(f"{engine[0]}o {engine[0]}o2")
        found.append(System(f"{engine}-off-{RUN}", both))
        found.append(System(f"{engine}-on-{RUN}", both, sharing=store))
    return found


class Documents:
    """One engine's answers about documents of one length."""

    def __init__(self, engine: str, off: Target, on: Target) -> None:
        first, second = f"{engine[0]}o", f"{engine[0]}o2"
        self._on, self._first = on, first
        self._none = Direct.within(off, first, "none", cached=True)
        self._own = Direct.within(off, first, "own", cached=True)
        self._cold = Direct.within(on, first, "cold on", cached=True)
        self._store = Direct.within(on, second, "store", cached=True)
        self.cells = {name: Cell() for name in WAYS}
        self.unstored = 0

    async def round(
        self, session: aiohttp.ClientSession, prompt: Prompt, key: str, turn: int
    ) -> None:
        before = await self._stored(session)
        cold = (self._none, self._cold) if turn % 2 else (self._cold, self._none)
        got: dict[str, Taken] = {}
        for way in cold:
            got[way.name] = await taken(way, session, prompt, key)
        if not await self._published(session, before + prompt.tokens // PAGE_TOKENS):
            self.unstored += 1
        for way in (self._own, self._store):
            got[way.name] = await taken(way, session, prompt, key)
        if turn >= WARM_UPS or not all(each.sample.ok for each in got.values()):
            for name, each in got.items():
                self.cells[name].add(each)

    async def _published(self, session: aiohttp.ClientSession, pages: int) -> bool:
        until_s = time.monotonic() + STORED_S
        while await self._stored(session) < pages:
            if time.monotonic() > until_s:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def _stored(self, session: aiohttp.ClientSession) -> int:
        client = Client(session, self._on.url, timeout_s=10.0, headers=self._on.headers)
        status = await client.status()
        return int(status.replicas[self._first].get("stored_pages") or 0)

    def figures(self) -> dict[str, Any]:
        return {**figures_of(self.cells), "unstored": self.unstored}


def figures_of(cells: Mapping[str, Cell]) -> dict[str, Any]:
    """Of the four ways to answer about documents of one length."""
    rows = {name: cell.summary() for name, cell in cells.items()}
    store, own = (rows[name].get("ttft_ms") for name in ("store", "own"))
    return {
        "ways": rows,
        "store_to_own": round(store / own, 3) if store and own else None,
        "cold": loss_of(cells["none"].ttft_ms, cells["cold on"].ttft_ms, COLD_BOUND),
    }


class Run:
    """One shape's."""

    def __init__(self, options: argparse.Namespace, budget: Budget, shape: str, logs: Path) -> None:
        self._options, self._budget, self._shape = options, budget, shape
        self._site = site_of(options, shape, logs)
        self._source = PromptSource.of_checkpoint(self._site.model, seed=0)
        self.documents: dict[str, dict[int, dict[str, Any]]] = {}
        self.turns: dict[str, dict[str, list[dict[str, Any]]]] = {}
        self._policies: dict[str, str] = {}
        """What the clusters' routers go by."""

    def measure(self) -> None:
        options, budget = self._options, self._budget
        wanted = systems(options.engines, STORE[options.device])
        with fleet(self._site, wanted, wait_s=budget.left_s * UP_SHARE) as started:
            up = [e for e in options.engines if self._pair(started, e) is not None]
            try:
                if "conversations" in options.parts:
                    self._talks(started, [e for e in options.talking if e in up])
                if "documents" in options.parts:
                    asyncio.run(self._reads(started, up))
            finally:
                self.write(started)

    def _pair(self, started: Fleet, engine: str) -> tuple[Target, Target] | None:
        off, on = (started.targets.get(f"{engine}-{way}-{RUN}") for way in ("off", "on"))
        return None if off is None or on is None else (off, on)

    def _talks(self, started: Fleet, engines: Sequence[str]) -> None:
        share = self._options.talking_share if "documents" in self._options.parts else 1.0
        budget = self._budget.part(share)
        for number, engine in enumerate(engines):
            self._conversed(started, engine, budget.part(1 / (len(engines) - number)))

    async def _reads(self, started: Fleet, engines: Sequence[str]) -> None:
        cells = list(itertools.product(self._options.lens, engines))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for number, (tokens, engine) in enumerate(cells):
                pair = self._pair(started, engine)
                assert pair is not None
                some = self._budget.part(1 / (len(cells) - number))
                await self._read(session, Documents(engine, *pair), engine, tokens, some)

    async def _read(
        self,
        session: aiohttp.ClientSession,
        documents: Documents,
        engine: str,
        tokens: int,
        budget: Budget,
    ) -> None:
        round_s = 0.0
        for turn in range(WARM_UPS + self._options.rounds):
            if not budget.allows(f"{engine}, {tokens} tokens, from round {turn} on", round_s):
                break
            began_s = time.monotonic()
            key = f"{turn}/{time.monotonic_ns()}"
            await documents.round(session, self._source.prompt(tokens, key), key, turn)
            round_s = time.monotonic() - began_s
        found = documents.figures()
        self.documents.setdefault(engine, {})[tokens] = found
        print(f"{engine}, {tokens} tokens: {_brief(found)}", flush=True)

    def _conversed(self, started: Fleet, engine: str, budget: Budget) -> None:
        seen_s = 0.0
        shown = {system.name: system for system in systems([engine], STORE[self._options.device])}
        for turn in range(self._options.repeats):
            for (name, system), policy in (
                (each, policy) for each in shown.items() for policy in POLICIES
            ):
                cell = f"{engine} {name.split('-')[1]}, {policy}"
                if not budget.allows(f"{cell}, turn {turn + 1}", seen_s):
                    continue
                began_s = time.monotonic()
                if self._policies.get(name, system.policy) != policy:
                    started.apply(replace(system, policy=policy))
                self._policies[name] = policy
                figures = asyncio.run(self._conversation(started.targets[name], f"{cell}{turn}"))
                self.turns.setdefault(engine, {}).setdefault(cell, []).append(figures)
                seen_s = time.monotonic() - began_s
                print(f"{cell}: {figures}, {budget.left_s:.0f} s left", flush=True)

    async def _conversation(self, target: Target, key: str) -> dict[str, Any]:
        options = self._options
        given = {"clients": options.clients, "turns": options.turns}
        lengths = {"tokens": options.turn_tokens, "output_tokens": options.output_len}
        return await conversations(target, self._source, key, **given, **lengths)

    def write(self, started: Fleet) -> None:
        measured = {
            "targets": {"store_to_own": WARM_BOUND, "cold": COLD_BOUND},
            "up_s": round(started.up_s, 1),
            "documents": self.documents,
            "conversations": self.turns,
            "left_out": self._budget.left_out,
            "failed": started.failed,
        }
        lines = [*table(self._shape, self.documents), *turns_table(self.turns)]
        lines += closing(self._budget.left_out, started.failed)
        variant = f"{self._shape}-{'-'.join(self._options.engines)}"
        write("gpu_sharing", variant, __doc__ or "", self._options, measured, lines)


def _brief(found: Mapping[str, Any]) -> dict[str, Any]:
    ways = {name: figures.get("ttft_ms") for name, figures in found["ways"].items()}
    return {**ways, "cold": said(found["cold"]), "unstored": found["unstored"]}


def table(shape: str, documents: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[str]:
    rows = {
        f"{engine}, {tokens} tokens": [
            *(f"{found['ways'][name].get('ttft_ms', '–')}" for name in WAYS),
            f"{found['store_to_own'] or '–'}",
            said(found["cold"]),
        ]
        for engine, by_length in documents.items()
        for tokens, found in by_length.items()
    }
    heads = [*WAYS, "store ÷ own", "cold on against none"]
    return [f"TTFT in ms, medians, {shape} shape.", "", *grid("document", heads, rows)]


def turns_table(turns: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> list[str]:
    names = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p95_ms", "hit_rate")
    rows = {
        cell: [", ".join(str(each.get(name, "–")) for each in rounds) for name in names]
        for by_cell in turns.values()
        for cell, rounds in by_cell.items()
    }
    return ["", *grid("conversations, by turns", names, rows)] if rows else []


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(
        __doc__ or "", engines="vllm,sglang,mlx", lens="4438,1138,16000", context_length=20480
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=2, help="of the conversations")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--talking", help="engines of the conversations; else the first one")
    parser.add_argument(
        "--talking-share", type=float, default=0.35, help="of the time, where there are both parts"
    )
    options = split(parser, words)
    options.parts = options.parts.split(",")
    options.talking = options.talking.split(",") if options.talking else options.engines[:1]
    return options


def main() -> int:
    options = parsed()
    return each_shape(options, lambda *given: Run(options, *given).measure(), UP_S)


if __name__ == "__main__":
    sys.exit(main())
