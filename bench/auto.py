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
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from auto_cells import Paths, cell, said, summed, verdict
from setting import RESULTS, machine, write

# `setting` has put the tests into the path
import tiny  # isort: skip
from e2e.cluster import Cluster, engine_env  # isort: skip
from engines.vllm_replicas import OPTIONS  # isort: skip
from engines.vllm_replicas import PYTHON as VLLM_PYTHON  # isort: skip

LENGTHS = (51, 184, 400, 744, 1100, 1500)
SHORT = 200
"""Up to this length twice as many rounds: some milliseconds scatter by as many."""
PATHS = Paths(alone="d0", pair="p0>d0")
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


def prompt(tokens: int, seed: int, turn: int, place: int) -> str:
    return str(tiny.digits(tokens, seed + 10 * turn + place))


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
            prompts = partial(prompt, tokens, 10_000 * at)
            taken = asyncio.run(cell(cluster.url, MODEL, PATHS, prompts, more))
            cells.append(summed(PATHS, rate, tokens, taken))
            print(json.dumps({k: v for k, v in cells[-1].items() if k != "samples_ms"}), flush=True)
        decisions = cluster.status()["decisions"]
    return cells, {"link_bytes_per_s": rate, "forecast": forecast, "decisions": decisions}


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
    found = verdict(cells, plans)
    report = {
        "method": __doc__,
        "engine": options.engine,
        "rounds": options.rounds,
        "steps_tokens": STEPS[options.engine],
        **found,
        "machine": machine("mlx", "mlx-lm"),
        "cells": cells,
        "plans": plans,
    }
    path = write(options.output, f"auto-{options.engine}", report)
    print(f"{said(found, len(cells))}; {path}")
    return 0 if found["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
