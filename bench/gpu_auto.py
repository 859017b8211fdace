"""Whether `disaggregate = "auto"` takes the better path on a GPU, as well as it expects.

A prefill and a decode replica of one engine for each link, all up at once and asked one after the
other. The data plane's sockets are paced to the link's rate; "0" is unpaced, on whatever
`transport = "auto"` chooses. Decode replicas compute prompts in steps of --decode-step tokens, as
one does whose answers may not wait, so that either path may win. Cells, figures and targets are
those of `auto.py`; a cell takes --rounds, or as many whole ones as fit into --cell-s, and at least
three. Where a link alone would take longer than --longest-s, the cell is left out.

    python bench/gpu_auto.py --shapes 7b --vllm-python PYTHON --tokenizer CHECKPOINT
    python bench/gpu_auto.py --devices 0,1 --rates 20,117,1150,0 ...

One H200 holds three pairs of the 7b shape with --pool-tokens 16384, 100 GB: up about 120 s.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from auto_cells import AUTO, Paths, cell, said, summed, verdict
from gpu_budget import Budget
from gpu_cluster import Fleet, Member, System, fleet
from gpu_options import UP_SHARE, each_shape, parser_of, site_of, split
from gpu_report import closing, grid, write

from pdctl.runtime.bench.prompts import PromptSource
from pdctl.topology.model import PAGE_TOKENS

UP_S = 120.0
RUN = os.getpid()


def systems(engine: str, rates: Sequence[int], decode_step: int) -> dict[int, System]:
    """By bytes per second; 0: not paced."""
    option = {"vllm": "max_num_batched_tokens", "mlx": "prefill_step_size"}[engine]
    found = {}
    for rate in rates:
        env = {"PDCTL_PACING_BYTES_PER_S": str(rate)} if rate else {}
        prefill = Member(f"{engine[0]}p", env=env)
        decode = Member(f"{engine[0]}d", env=env, options={option: decode_step})
        transport = "tcp" if rate else "auto"
        name = f"auto-{rate // 10**6}-{RUN}"
        both = (prefill, decode)
        found[rate] = System(name, both, transport=transport, disaggregate="auto")
    return found


class Run:
    """One shape's."""

    def __init__(self, options: argparse.Namespace, budget: Budget, shape: str, logs: Path) -> None:
        self._options, self._budget, self._shape = options, budget, shape
        self._site = site_of(options, shape, logs)
        self._source = PromptSource.of_checkpoint(self._site.model, seed=0)
        self._engine = options.engines[0]
        self._paths = Paths(f"{self._engine[0]}d", f"{self._engine[0]}p>{self._engine[0]}d")
        self.cells: list[dict[str, Any]] = []
        self.plans: list[dict[str, Any]] = []

    def measure(self) -> None:
        options = self._options
        wanted = systems(self._engine, options.rates, options.decode_step)
        up_s = self._budget.left_s * UP_SHARE
        with fleet(self._site, list(wanted.values()), wait_s=up_s) as started:
            try:
                for number, (rate, system) in enumerate(wanted.items()):
                    if system.name in started.targets:
                        some = self._budget.part(1 / (len(wanted) - number))
                        self._linked(started, system.name, rate, some)
            finally:
                self.write(started)

    def _linked(self, started: Fleet, name: str, rate: int, budget: Budget) -> None:
        target = started.targets[name]
        forecast = started.forecast(name)
        self.plans.append({"link_bytes_per_s": rate, "forecast": forecast})
        for tokens in self._options.lens:
            moving_s = -(-tokens // PAGE_TOKENS) * self._site.page_bytes / rate if rate else 0.0
            what = f"{tokens} tokens at {rate // 10**6} MB/s"
            if moving_s > self._options.longest_s:
                self._budget.allows(f"{what}, {moving_s:.0f} s each", float("inf"))
                continue
            if not budget.allows(what, 3 * moving_s + 1.0):
                continue

            def prompt_of(turn: int, place: int, tokens: int = tokens) -> str:
                return self._source.prompt(tokens, f"{name}/{turn}/{place}/{time.time_ns()}").text

            taken = asyncio.run(
                cell(
                    *(target.url, target.plan.model, self._paths, prompt_of, self._options.rounds),
                    within_s=min(self._options.cell_s, budget.left_s),
                )
            )
            self.cells.append(summed(self._paths, rate, tokens, taken))
            print(f"{what}: {_brief(self.cells[-1])}, {budget.left_s:.0f} s left", flush=True)

    def write(self, started: Fleet) -> None:
        if not self.cells:
            return
        found = verdict(self.cells, self.plans)
        measured = {
            "up_s": round(started.up_s, 1),
            **found,
            "cells": self.cells,
            "plans": self.plans,
            "left_out": self._budget.left_out,
            "failed": started.failed,
        }
        lines = [f"{self._shape} shape, TTFT in ms, medians.", "", *table(self._paths, self.cells)]
        lines += ["", f"{said(found, len(self.cells))}."]
        lines += closing(self._budget.left_out, started.failed)
        variant = f"{self._shape}-{self._engine}"
        write("gpu_auto", variant, __doc__ or "", self._options, measured, lines)


def _brief(found: Mapping[str, Any]) -> dict[str, Any]:
    names = ("ttft_ms", "auto_of_better", "auto_took", "expected_off")
    return {name: found[name] for name in names}


def table(paths: Paths, cells: Sequence[Mapping[str, Any]]) -> list[str]:
    heads = [*paths, AUTO, "auto ÷ the better", "auto took", "expected off by"]
    rows = {}
    for each in cells:
        rate = each["link_bytes_per_s"] // 10**6
        took = ", ".join(f"{path} {count}" for path, count in each["auto_took"].items() if count)
        rows[f"{f'{rate} MB/s' if rate else 'unpaced'}, {each['prompt_tokens']} tokens"] = [
            *(f"{each['ttft_ms'][name]:.1f}" for name in (*paths, AUTO)),
            f"{each['auto_of_better']:.2f}",
            took,
            f"{each['expected_off']:.0%}",
        ]
    return grid("link, prompt", heads, rows)


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    lens = "51,184,744,2844,8000"
    parser = parser_of(__doc__ or "", engines="vllm", lens=lens, context_length=8192)
    parser.add_argument("--rates", default="117,1150,20", help="MB/s; 0: unpaced")
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--cell-s", type=float, default=8.0)
    parser.add_argument("--longest-s", type=float, default=6.0)
    parser.add_argument("--decode-step", type=int, default=256, help="tokens")
    options = split(parser, words)
    options.rates = [int(rate) * 10**6 for rate in options.rates.split(",")]
    return options


def main() -> int:
    options = parsed()
    return each_shape(options, lambda *given: Run(options, *given).measure(), UP_S)


if __name__ == "__main__":
    sys.exit(main())
