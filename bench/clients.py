"""Other people's load generators beside `pdctl bench`, the same load through the same pair.

An MLX pair of the demo model on this machine. In every round `vllm bench serve`, guidellm and
`pdctl bench` take turns, another one first each time, and send the same prompts one after the
other (a handoff reads no prompt cache); figures are medians over all rounds, from what each
client wrote itself. Target: TTFT, TPOT and ITL within 5 % of ours; guidellm's word for TPOT is
inter-token latency, (last text - first text) / (tokens - 1). Its "time per output token" is
another thing: (last text - request) / tokens.

    python bench/clients.py [--rounds 3] [--requests 4] [--output DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from setting import RESULTS, machine, models, write

from pdctl.runtime.bench.prompts import PromptSource

# `setting` has put the tests into the path
from e2e.clients import Load, Told, guidellm, vllm_bench_serve  # isort: skip
from e2e.cluster import Cluster  # isort: skip

TARGET = 0.05
INPUT_TOKENS, OUTPUT_TOKENS = 184, 16
PATH = "p0>d0"
OURS = "pdctl bench"


def prompts(model_dir: Path, requests: int, seed: int) -> tuple[str, ...]:
    """Those that `pdctl bench` sends one at a time, without warm-ups."""
    source = PromptSource.of_checkpoint(model_dir, seed=seed)
    return tuple(source.prompt(INPUT_TOKENS, f"1/{n}/0/0").text for n in range(requests))


def pdctl_bench(cluster: Cluster, load: Load, seed: int) -> Told:
    """The pair's cell alone; its other column is measured beside it."""
    done = cluster.pdctl(
        *("bench", cluster.topology, "--json", "--num-warmups", 0, "--seed", seed),
        *("--input-lens", INPUT_TOKENS, "--output-len", load.output_tokens),
        *("--num-prompts", len(load.prompts)),
    )
    found = next(p for p in json.loads(done.stdout)["points"] if p["pd_path"] == PATH)
    spans = zip(found["latencies"], found["ttfts"], found["output_lens"], strict=True)
    return Told(
        completed=found["completed"],
        failed=found["failed"],
        input_tokens=found["total_input_tokens"],
        output_tokens=found["total_output_tokens"],
        ttft_ms=[1000 * s for s in found["ttfts"]],
        tpot_ms=[1000 * (whole - first) / (n - 1) for whole, first, n in spans if n > 1],
        itl_ms=[found["median_itl_ms"]],
    )


def measured(
    cluster: Cluster, model_dir: Path, rounds: int, requests: int
) -> dict[str, list[Told]]:
    told: dict[str, list[Told]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            load = Load(prompts(model_dir, requests, number), OUTPUT_TOKENS)
            there = (cluster.url, cluster.model, model_dir, load, PATH)
            turns = {
                "vllm bench serve": partial(vllm_bench_serve, *there, into=Path(folder)),
                "guidellm": partial(guidellm, *there, into=Path(folder)),
                OURS: partial(pdctl_bench, cluster, load, number),
            }
            names = list(turns)
            for name in names[number % 3 :] + names[: number % 3]:
                told[name].append(turns[name]())
    return told


def summed(told: list[Told]) -> dict[str, Any]:
    return {
        "completed": sum(t.completed for t in told),
        "failed": sum(t.failed for t in told),
        "input_tokens": sum(t.input_tokens for t in told),
        "output_tokens": sum(t.output_tokens for t in told),
        **{
            f"median_{metric}": _median(found)
            for metric in ("ttft_ms", "tpot_ms", "itl_ms")
            if (found := [ms for t in told for ms in getattr(t, metric)])
        },
    }


def report_of(told: dict[str, list[Told]]) -> dict[str, Any]:
    clients = {name: summed(runs) for name, runs in told.items()}
    off = {
        name: {
            metric: round(value / clients[OURS][metric] - 1, 4)
            for metric, value in found.items()
            if metric.startswith("median")
        }
        for name, found in clients.items()
        if name != OURS
    }
    return {
        "method": __doc__,
        "machine": machine("mlx", "mlx-lm"),
        "load": {"input_tokens": INPUT_TOKENS, "output_tokens": OUTPUT_TOKENS, "path": PATH},
        "target": f"within {TARGET:.0%} of {OURS}",
        "clients": clients,
        "ttft_ms": {name: [_rounded(t.ttft_ms) for t in runs] for name, runs in told.items()},
        "off_ours": off,
        "met": all(abs(share) <= TARGET for shares in off.values() for share in shares.values()),
    }


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 1) for value in values]


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model_dir = next(iter(models(None, Path(folder)).values()))
        roles = {"p0": "prefill", "d0": "decode"}
        with Cluster(Path(folder), model_dir, model=model_dir.name, roles=roles) as cluster:
            told = measured(cluster, model_dir, asked.rounds, asked.requests)
    report = report_of(told)
    path = write(asked.output, "clients", report)
    print(json.dumps({"clients": report["clients"], "off_ours": report["off_ours"]}, indent=2))
    print(f"wrote {path}")
    return 0 if report["met"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
