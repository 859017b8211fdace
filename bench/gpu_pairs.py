"""Time to the first token: each engine alone, through its own handoff, and in pdctl's pairs.

A cluster of the engines in both roles is launched by `pdctl up`; beside it run the engines' own
servers, which have no connector, two vLLMs with vLLM's NixlConnector, and a cluster of SGLang with
its own NIXL backend. Prompts have exactly the asked number of tokens and are in no prefix cache. In
a round each way answers the same prompt, one after the other, another one first each time. TTFT is
the time to the first chunk with text of a streamed answer, at one and the same client: through the
router for pairs, straight from the engine for what stands alone.

    floor       max(P alone, bytes / rate) + D's decode step
    P alone     TTFT of the same engine without any connector
    D's step    TPOT of the decode replica, serving alone; none of SGLang, which shows P's token
    rate        a plain socket copy of as many bytes between two processes, in the same run;
                of what is paced, 117 MB/s
    fixed cost  TTFT - P alone - D's step

Replicas: vp, vd, sp, sd, mp, md are as they come, their data planes processes of their own (of MLX
inside of the engine's); vpi and vdi have them inside; vpq is a prefill replica whose pages are
paced; vnp and vnd are joined by vLLM's own NIXL, "sp>sd native" by SGLang's.

    python bench/gpu_pairs.py --vllm-python PYTHON --mlx-python PYTHON --tokenizer CHECKPOINT
    python bench/gpu_pairs.py --engines vllm,sglang,mlx --extras native ...

Seconds on one H200 with 16 cores: up 110 (0.5b) or 120 (7b); a round of 13 ways 2 (51 tokens) to
6 (8000 tokens); down 10.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from gpu_budget import Budget
from gpu_cluster import Fleet, Member, System, fleet, members
from gpu_engines import Server, ordinary, vllm_nixl
from gpu_floor import PACED, PACED_BYTES_PER_S, TARGETS, Cells, figures_of, table
from gpu_loopback import rates
from gpu_options import UP_SHARE, each_shape, parser_of, site_of, split
from gpu_paired import loss_of
from gpu_report import Cell, closing, write
from gpu_ways import Direct, Named, Nixl, Routed, Way, taken

from pdctl.runtime.bench.columns import columns
from pdctl.runtime.bench.prompts import PromptSource
from pdctl.topology.model import PAGE_TOKENS

EXTRAS = ("inside", "paced", "nixl", "native", "alone")
INSIDE = {"PDCTL_DATA_PLANE": "inside"}
PACING = {"PDCTL_PACING_BYTES_PER_S": str(PACED_BYTES_PER_S)}
UP_S = 130.0
SECONDS_PER_1000 = 0.05
"""A way's seconds per 1000 tokens beyond the first, and for whatever length: what a round is
expected to take before one has been seen."""


def systems(engines: Sequence[str], extras: Sequence[str]) -> Iterator[System]:
    found = [m for engine in engines for m in members(f"{engine[0]}p {engine[0]}d")]
    if "vllm" in engines and "inside" in extras:
        found += [Member("vpi", env=INSIDE), Member("vdi", env=INSIDE)]
    if "vllm" in engines and "paced" in extras:
        found.append(Member(PACED, env=PACING))
    yield System(f"pairs-{os.getpid()}", tuple(found))
    if "sglang" in engines and "native" in extras:
        yield System(f"native-{os.getpid()}", members("sp sd"), transport="native")


def is_asked(path: str) -> bool:
    """A pair of one engine has both data planes of one kind; what is paced goes to MLX, or where
    there is none, to nobody else's; MLX alone is measured by itself."""
    prefill, _, decode = path.partition(">")
    if not decode:
        return True
    if prefill == PACED:
        return decode == "md"
    if path == "mp>md":
        return False
    return prefill[0] != decode[0] or prefill.endswith("i") == decode.endswith("i")


def ways(started: Fleet) -> list[Way]:
    found: list[Way] = []
    servers = started.servers
    found += [Direct.of(s) for name, s in servers.items() if name not in ("vnp", "vnd")]
    for name, target in started.targets.items():
        for column in columns(target.plan):
            if not is_asked(column.path):
                continue
            way: Way = Routed(target, column)
            if name.startswith("native"):
                way = Named(f"{column.path} native", way)
            found.append(way)
    if {"vnp", "vnd"} <= set(servers):
        found.append(Nixl(servers["vnp"], servers["vnd"]))
    return found


async def sweep(
    ways: Sequence[Way],
    prompts: PromptSource,
    options: argparse.Namespace,
    budget: Budget,
    cells: Cells,
) -> None:
    """Adds to the cells by prompt length and way; rounds are whole."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for tokens in options.lens:
            row: dict[str, Cell] = {}
            round_s = len(ways) * SECONDS_PER_1000 * (3 + tokens / 1000)
            for turn in range(options.warm_ups + options.rounds):
                if not budget.allows(f"{tokens} tokens from round {turn} on", round_s):
                    break
                began_s = time.monotonic()
                key = f"{turn}/{time.monotonic_ns()}"
                prompt = prompts.prompt(tokens, key)
                for way in (*ways[turn % len(ways) :], *ways[: turn % len(ways)]):
                    cell = row.setdefault(way.name, Cell())
                    if cell.given_up:
                        continue
                    found = await taken(way, session, prompt, key)
                    if turn >= options.warm_ups or not found.sample.ok:
                        cell.add(found)
                round_s = time.monotonic() - began_s
            if any(cell.taken for cell in row.values()):
                cells[tokens] = {way.name: row[way.name] for way in ways}
            said = {name: cell.summary().get("ttft_ms") for name, cell in row.items()}
            print(f"{tokens} tokens: {said}, {budget.left_s:.0f} s left", flush=True)


class Run:
    """One checkpoint's measurements."""

    def __init__(self, options: argparse.Namespace, budget: Budget, shape: str, logs: Path) -> None:
        self._options, self._budget, self._shape = options, budget, shape
        self._site = site_of(options, shape, logs)
        self.cells: Cells = {}

    def measure(self) -> None:
        options, budget, site = self._options, self._budget, self._site
        beside: list[Server] = []
        if "alone" in options.extras:
            beside += [ordinary(site, engine) for engine in options.alone]
        if "nixl" in options.extras and "vllm" in options.engines:
            beside += vllm_nixl(site)
        wanted = list(systems(options.engines, options.extras))
        with fleet(site, wanted, beside, budget.left_s * UP_SHARE) as started:
            prompts = PromptSource.of_checkpoint(site.model, seed=0)
            found = ways(started)
            try:
                if found:
                    asyncio.run(sweep(found, prompts, options, budget, self.cells))
            finally:
                self.write(started)

    def write(self, started: Fleet) -> None:
        sizes = {n: -(-(n - 1) // PAGE_TOKENS) * self._site.page_bytes for n in self.cells}
        copied = rates(sorted(set(sizes.values())))
        rows, planes = figures_of(self.cells, sizes, copied), _planes(self.cells)
        measured = {
            "targets": TARGETS,
            "up_s": round(started.up_s, 1),
            "rows": rows,
            "loopback_gb_per_s": {size: round(rate / 1e9, 2) for size, rate in copied.items()},
            "handoff_bytes": sizes,
            "apart_to_inside": planes,
            "left_out": self._budget.left_out,
            "failed": started.failed,
        }
        title = f"TTFT, {self._shape} shape, median (p95) in ms; in brackets × the floor."
        lines = [*table(title, rows), "", *_planes_said(planes)]
        lines += closing(self._budget.left_out, started.failed)
        variant = f"{self._shape}-{'-'.join(self._options.engines)}"
        write("gpu_pairs", variant, __doc__ or "", self._options, measured, lines)


def _planes(cells: Cells) -> dict[str, dict[int, Any]]:
    """What a data plane of its own costs: the same pairs, by turns, with it and without."""
    return {
        f"{apart} against {inside}": {
            tokens: loss_of(row[inside].ttft_ms, row[apart].ttft_ms, 0.0)
            for tokens, row in cells.items()
            if inside in row and apart in row
        }
        for apart, inside in (("vp>vd", "vpi>vdi"), ("vp>md", "vpi>md"), ("mp>vd", "mp>vdi"))
    }


def _planes_said(planes: dict[str, dict[int, Any]]) -> Iterator[str]:
    for pair, losses in planes.items():
        found = [f"{each['loss']:+.1%} at {n}" for n, each in losses.items() if each["pairs"]]
        if found:
            yield f"{pair}, medians of differences: {', '.join(found)}."


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(
        __doc__ or "", engines="vllm,mlx", lens="2844,51,8000,744,184", context_length=8192
    )
    parser.add_argument("--extras", default=",".join(EXTRAS), help=f"of {', '.join(EXTRAS)}")
    parser.add_argument("--alone", help="of which engines the own server runs; else of all")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--warm-ups", type=int, default=1)
    options = split(parser, words)
    options.extras = options.extras.split(",")
    options.alone = options.alone.split(",") if options.alone else options.engines
    return options


def main() -> int:
    options = parsed()
    return each_shape(options, lambda *given: Run(options, *given).measure(), UP_S)


if __name__ == "__main__":
    sys.exit(main())
