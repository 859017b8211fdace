"""What a prefill replica loses by its connector while it has nothing to send.

An ordinary vLLM without any connector, and prefill replicas of a cluster that are asked directly,
without a handoff: one with its data plane in a process of its own ("apart", as it comes), one with
it inside ("inside"). Each eager and with CUDA graphs, all of them up together; nothing else runs.
In a round each answers the same prompt, one after the other, another one first each time. The loss
is the median of the differences of TTFT within rounds, by the ordinary one's median, with its
bootstrap interval; rounds of a length go on until each loss is decided against 2 %, or its share of
the time is over.

    python bench/gpu_idle.py --vllm-python PYTHON --tokenizer CHECKPOINT

Seconds on one H200 with 16 cores: up 145, of which graphs take the last 40; a round of six ways 0.3
(51 tokens) to 0.5 (8000 tokens); 200 rounds of a length some 80.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from gpu_budget import Budget
from gpu_cluster import Fleet, Member, System, fleet
from gpu_engines import Server, Site, vllm
from gpu_options import UP_SHARE, each_shape, parser_of, site_of, split
from gpu_paired import LEAST, loss_of, said
from gpu_pairs import INSIDE
from gpu_report import Cell, closing, grid, write
from gpu_ways import Direct, taken

from pdctl.runtime.bench.prompts import PromptSource
from pdctl.topology.model import Engine

BOUND = 0.02
MODES = {"eager": False, "graphs": True}
PLANES = {"apart": "vp", "inside": "vpi"}
PLAIN = "ordinary"
OUTPUT_TOKENS = 3
"""vLLM begins the second step before it shows the first token."""
WARM_UPS = 3
LOOK_EVERY = 10
UP_S = 150.0

Cells = dict[str, Cell]


def systems(modes: Sequence[str]) -> list[System]:
    """A decode replica for the sake of the topology: nobody asks it, and eager it is up sooner."""
    nobody = Member("vd", options={"enforce_eager": True})
    found = (Member("vp"), Member("vpi", env=INSIDE), nobody)
    return [System(f"{mode}-{os.getpid()}", found, graphs=MODES[mode]) for mode in modes]


def servers(site: Site, modes: Sequence[str]) -> list[Server]:
    return [vllm(replace(site, graphs=MODES[mode]), f"{PLAIN}-{mode}") for mode in modes]


def ways(started: Fleet, modes: Sequence[str]) -> Iterator[Direct]:
    """Of the modes of which all came up."""
    for mode in modes:
        plain = started.servers.get(f"{PLAIN}-{mode}")
        target = started.targets.get(f"{mode}-{os.getpid()}")
        if plain is None or target is None:
            continue
        yield Direct(f"{PLAIN} {mode}", Engine.VLLM, plain.url, plain.model)
        for plane, replica in PLANES.items():
            yield Direct.within(target, replica, f"{plane} {mode}")


def losses(cells: Cells) -> dict[str, dict[str, Any]]:
    found = {}
    for name, cell in cells.items():
        plane, _, mode = name.partition(" ")
        if plane != PLAIN:
            plain = cells[f"{PLAIN} {mode}"]
            found[name] = loss_of(plain.ttft_ms, cell.ttft_ms, BOUND)
    return found


async def sweep(
    ways: Sequence[Direct],
    prompts: PromptSource,
    options: argparse.Namespace,
    budget: Budget,
    found: dict[int, Cells],
) -> None:
    """Rounds are whole, so that differences are within rounds; one in which a way failed is
    not counted."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for number, tokens in enumerate(options.lens):
            some = budget.part(1 / (len(options.lens) - number))
            cells = {way.name: Cell() for way in ways}
            for turn in range(WARM_UPS + options.rounds):
                if not some.allows(f"{tokens} tokens from round {turn} on"):
                    break
                key = f"{turn}/{time.monotonic_ns()}"
                prompt = prompts.prompt(tokens, key)
                order = (*ways[turn % len(ways) :], *ways[: turn % len(ways)])
                got = {w.name: await taken(w, session, prompt, key, OUTPUT_TOKENS) for w in order}
                if turn >= WARM_UPS and all(each.sample.ok for each in got.values()):
                    for name, each in got.items():
                        cells[name].add(each)
                if turn >= LEAST and turn % LOOK_EVERY == 0 and _decided(cells):
                    break
            if all(cell.taken for cell in cells.values()):
                found[tokens] = cells
                print(f"{tokens} tokens: {losses(cells)}, {budget.left_s:.0f} s left", flush=True)


def _decided(cells: Cells) -> bool:
    return all(each["decided"] for each in losses(cells).values())


def measure(options: argparse.Namespace, budget: Budget, shape: str, logs: Path) -> None:
    site = site_of(options, shape, logs)
    wanted, beside = systems(options.modes), servers(site, options.modes)
    with fleet(site, wanted, beside, budget.left_s * UP_SHARE) as started:
        found: dict[int, Cells] = {}
        try:
            if asked := list(ways(started, options.modes)):
                prompts = PromptSource.of_checkpoint(site.model, seed=0)
                asyncio.run(sweep(asked, prompts, options, budget, found))
        finally:
            write_found(options, budget, shape, started, found)


def write_found(
    options: argparse.Namespace, budget: Budget, shape: str, started: Fleet, cells: dict[int, Cells]
) -> None:
    by_length = {tokens: losses(row) for tokens, row in cells.items()}
    measured = {
        "up_s": round(started.up_s, 1),
        "losses": by_length,
        "samples": {
            tokens: {name: cell.summary() for name, cell in row.items()}
            for tokens, row in cells.items()
        },
        "left_out": budget.left_out,
        "failed": started.failed,
    }
    names = list(dict.fromkeys(name for row in by_length.values() for name in row))
    heads = [f"{tokens} tokens" for tokens in by_length]
    rows = {name: [said(row[name]) for row in by_length.values()] for name in names}
    title = f"Loss of TTFT of an idle prefill replica, {shape} shape, against {BOUND:.0%}."
    lines = [title, "", *grid("data plane", heads, rows)]
    lines += closing(budget.left_out, started.failed)
    write("gpu_idle", shape, __doc__ or "", options, measured, lines)


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__ or "", engines="vllm", lens="2844,51,744,8000", context_length=8192)
    parser.add_argument("--modes", default="eager,graphs")
    parser.add_argument("--rounds", type=int, default=400, help="at most, of each length")
    options = split(parser, words)
    options.modes = options.modes.split(",")
    return options


def main() -> int:
    options = parsed()
    return each_shape(options, lambda *given: measure(options, *given), UP_S)


if __name__ == "__main__":
    sys.exit(main())
