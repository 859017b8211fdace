"""Whether `disaggregate = "auto"` takes the better path, and whether what is expected comes true.

A prefill and a decode replica of one engine on this machine, launched by `pdctl up` as a user does,
once per rate of an emulated link (the data plane's sockets are paced, SO_MAX_PACING_RATE). The
decode replica computes prompts in smaller steps and is slower at it, so that either path may win.
For each prompt length rounds of three streamed requests, in every order in turn: pinned to the
decode replica alone, pinned to the pair, and not pinned (`auto`). No two prompts are alike, prompt
caches are off; up to 200 tokens there are twice as many rounds. A cell is one rate and one length;
its figures are medians of the time from the request to the first event, at the client. Every
request refines the costs, pinned ones too, as it would for a user.

Targets: `auto` is at most 1.05 × the better of the two in at least 95 % of the cells; what
`pdctl plan` predicts right after `up`, and what the router expects of a path when it decides, are
off by at most 25 % in the median.

    python bench/auto.py [--engine mlx] [--rates 20,117,1150] [--rounds 24] [--output DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from setting import RESULTS, machine, write

# `setting` has put the tests into the path
import tiny  # isort: skip
from e2e.cluster import Cluster, engine_env  # isort: skip
from engines.vllm_replicas import OPTIONS  # isort: skip
from engines.vllm_replicas import PYTHON as VLLM_PYTHON  # isort: skip

LENGTHS = (51, 184, 400, 744, 1100, 1500)
SHORT = 200
"""Up to this length twice as many rounds: some milliseconds scatter by as many."""
WORSE, CELLS, OFF = 1.05, 0.95, 0.25
PAIR, ALONE, AUTO = "p0>d0", "d0", "auto"
STEPS = {"mlx": ("prefill_step_size", 128, 32), "vllm": ("max_num_batched_tokens", 512, 64)}
"""Option, and what the prefill and the decode replica have of it, in tokens."""
MODEL = "tiny"


class Auto(Cluster):
    """One pair over a link of `rate` bytes per second."""

    def __init__(self, folder: Path, model_dir: Path, engine: str, rate: int) -> None:
        super().__init__(folder, model_dir, model=MODEL)
        head = self.topology.read_text().partition("[[replicas]]")[0]
        head = head.replace("[router]", '[router]\ndisaggregate = "auto"')
        option, *steps = STEPS[engine]
        replicas = [
            replica(name, role, model_dir, engine, core, {option: step}, rate)
            for core, (name, role, step) in enumerate(
                zip(("p0", "d0"), ("prefill", "decode"), steps, strict=True)
            )
        ]
        self.topology.write_text(head + "".join(replicas))


def replica(
    name: str,
    role: str,
    model_dir: Path,
    engine: str,
    core: int,
    options: dict[str, Any],
    rate: int,
) -> str:
    vllm = engine == "vllm"
    env = {"VLLM_CPU_OMP_THREADS_BIND": str(core)} if vllm else engine_env()
    env["PDCTL_PACING_BYTES_PER_S"] = str(rate)
    config = {**OPTIONS, **options} if vllm else options
    python = f'python = "{VLLM_PYTHON}"' if vllm else ""
    return f"""
[[replicas]]
name = "{name}"
engine = "{engine}"
role = "{role}"
model = "{model_dir}"
compute_dtype = "float32"
{python}
env = {{ {", ".join(f'{key} = "{value}"' for key, value in env.items())} }}
engine_config = {{ {", ".join(f"{key} = {str(value).lower()}" for key, value in config.items())} }}
"""


class Taken:
    """One request: milliseconds, the path that it took, what was expected of each."""

    def __init__(self, ttft_ms: float, headers: Any) -> None:
        self.ttft_ms = ttft_ms
        self.path = headers["x-pdctl-path"]
        decision = headers.get("x-pdctl-decision", "")
        self.reason = decision.partition(";")[0]
        found = re.findall(r"(\S+)=([\d.e+]+)ms", decision)
        self.expected_ms = {path: float(ms) for path, ms in found}


async def asked(http: aiohttp.ClientSession, url: str, prompt: str, pin: str | None) -> Taken:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 2,
        "temperature": 0.0,
        "stream": True,
        "pdctl_cache": False,
        "cache_salt": prompt[:32],
    }
    began_s = time.perf_counter()
    headers = {} if pin is None else {"x-pdctl-path": pin}
    async with http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        first_s = None
        async for line in answer.content:
            if first_s is None and line.startswith(b"data:"):
                first_s = time.perf_counter()
        if first_s is None:
            raise RuntimeError("an answer without an event")
        return Taken((first_s - began_s) * 1e3, answer.headers)


async def cell(url: str, tokens: int, rounds: int, seed: int) -> dict[str, list[Taken]]:
    """Rounds at one length, in every order: what ran before leaves warm and cold cores."""
    taken: dict[str, list[Taken]] = {AUTO: [], ALONE: [], PAIR: []}
    orders = list(itertools.permutations(taken))
    async with aiohttp.ClientSession() as http:
        for turn in range(rounds):
            for place, name in enumerate(orders[turn % len(orders)]):
                prompt = tiny.digits(tokens, seed + 10 * turn + place)
                pin = None if name == AUTO else name
                taken[name].append(await asked(http, url, prompt, pin))
    return taken


def summed(rate: int, tokens: int, taken: dict[str, list[Taken]]) -> dict[str, Any]:
    medians = {name: statistics.median(t.ttft_ms for t in each) for name, each in taken.items()}
    off = [
        abs(expected / medians[path] - 1)
        for one in taken[AUTO]
        for path, expected in one.expected_ms.items()
    ]
    return {
        "link_bytes_per_s": rate,
        "prompt_tokens": tokens,
        "ttft_ms": {name: round(value, 3) for name, value in medians.items()},
        "auto_of_better": round(medians[AUTO] / min(medians[ALONE], medians[PAIR]), 4),
        "auto_took": {path: sum(t.path == path for t in taken[AUTO]) for path in (ALONE, PAIR)},
        "reasons": {r: sum(t.reason == r for t in taken[AUTO]) for r in
                    sorted({t.reason for t in taken[AUTO]})},
        "first_expected_ms": taken[AUTO][0].expected_ms,
        "expected_off": round(statistics.median(off), 4),
        "samples_ms": {n: [round(t.ttft_ms, 3) for t in each] for n, each in taken.items()},
    }  # fmt: skip


def planned(cluster: Cluster) -> dict[str, Any]:
    done = cluster.pdctl("plan", cluster.topology, "--offline", "--json")
    return dict(json.loads(done.stdout)["forecast"])


def measured(
    engine: str, model_dir: Path, rate: int, rounds: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Auto(Path(folder), model_dir, engine, rate) as cluster,
    ):
        forecast = planned(cluster)
        cells = []
        for at, tokens in enumerate(LENGTHS):
            more = rounds if tokens > SHORT else 2 * rounds
            taken = asyncio.run(cell(cluster.url, tokens, more, 10_000 * at))
            cells.append(summed(rate, tokens, taken))
            print(json.dumps({k: v for k, v in cells[-1].items() if k != "samples_ms"}), flush=True)
        decisions = cluster.status()["decisions"]
    return cells, {"link_bytes_per_s": rate, "forecast": forecast, "decisions": decisions}


def plans_off(cells: list[dict[str, Any]], plans: list[dict[str, Any]]) -> list[float]:
    """How far what `plan` said right after `up` is from the medians that came."""
    off = []
    for plan in plans:
        for path in plan["forecast"]["paths"]:
            for predicted in path["cells"]:
                off += [
                    abs(predicted["ttft_ms"] / c["ttft_ms"][path["path"]] - 1)
                    for c in cells
                    if c["prompt_tokens"] == predicted["tokens"]
                    and c["link_bytes_per_s"] == plan["link_bytes_per_s"]
                    and path["path"] in c["ttft_ms"]
                ]
    return off


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=sorted(STEPS), default="mlx")
    parser.add_argument("--rates", default="20,117,1150", help="MB/s, with commas between them")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    cells: list[dict[str, Any]] = []
    plans: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = tiny.make_checkpoint(Path(scratch) / "model", "llama")
        for rate in options.rates.split(","):
            found, plan = measured(options.engine, model_dir, int(rate) * 10**6, options.rounds)
            cells += found
            plans.append(plan)
    good = sum(each["auto_of_better"] <= WORSE for each in cells) / len(cells)
    plan_off = statistics.median(plans_off(cells, plans))
    router_off = statistics.median(each["expected_off"] for each in cells)
    met = good >= CELLS and max(plan_off, router_off) <= OFF
    report = {
        "method": __doc__,
        "engine": options.engine,
        "rounds": options.rounds,
        "steps_tokens": STEPS[options.engine],
        "targets": {"auto_of_better": WORSE, "share_of_cells": CELLS, "off": OFF},
        "share_of_cells": round(good, 4),
        "plan_off": round(plan_off, 4),
        "router_off": round(router_off, 4),
        "met": met,
        "machine": machine("mlx", "mlx-lm"),
        "cells": cells,
        "plans": plans,
    }
    path = write(options.output, f"auto-{options.engine}", report)
    print(
        f"auto ≤ {WORSE} × the better in {good:.0%} of {len(cells)} cells; plan off by "
        f"{plan_off:.0%}, router by {router_off:.0%}: {'met' if met else 'missed'}; {path}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
