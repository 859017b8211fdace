"""The handoff's fixed cost: what lies between prefill's last forward and decode's first.

A real pair of MLX replicas, launched by `pdctl up` as a user does, and requests of 51 prompt
tokens through it, one at a time. After each, the phase histograms of both replicas tell the
last observation of `transfer` (P: the last forward pass that a page needs has ended → Done has
arrived) and of `import` (D: the last page has been committed → its first forward begins). Their
sum covers everything between the two forward passes that is neither, and a little more: Done's
way back runs beside `import`. `queue` is shown beside them: a free budget must cost nothing.

The figure is the median over the requests, and the p95. Target: at most 20 ms in the median.

    python bench/handoff_fixed_cost.py [--requests 100] [--model DIR] [--output DIR]

Without --model: the demo model (`pdctl demo-model`) and a tiny random checkpoint.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from setting import RESULTS, machine, models, summary, write

# `setting` has put the tests into the path
from e2e.cluster import Cluster  # isort: skip
from e2e.prompts import exact_prompt  # isort: skip

TARGET_MS = 20.0
PROMPT_TOKENS = 51
WARM_UPS = 10
PATH = "p0>d0"
PHASES = {"queue": "p0", "transfer": "p0", "import": "d0"}
"""Each phase with the replica that observes it."""


def phases_of(cluster: Cluster) -> dict[str, tuple[int, float]]:
    """Observations so far and the last one in seconds, by phase."""
    status = cluster.status()
    by_name = {replica["name"]: replica["phases"] for replica in status["replicas"]}
    found = {phase: by_name[name].get(phase) for phase, name in PHASES.items()}
    return {
        phase: (sum(each["counts"]), each["last_s"]) if each else (0, 0.0)
        for phase, each in found.items()
    }


def sampled_ms(cluster: Cluster, model_dir: Path, requests: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in (*PHASES, "fixed_cost")}
    before = phases_of(cluster)
    for turn in range(WARM_UPS + requests):
        prompt = exact_prompt(model_dir, PROMPT_TOKENS, seed=turn)
        answer = cluster.completion(prompt, PATH, max_tokens=2)
        answer.raise_for_status()
        tokens = answer.json()["usage"]["prompt_tokens"]
        after = phases_of(cluster)
        observed = {phase: after[phase][0] - before[phase][0] for phase in PHASES}
        if tokens != PROMPT_TOKENS or set(observed.values()) != {1}:
            raise RuntimeError(f"{tokens} tokens were observed as {observed}")
        before = after
        if turn < WARM_UPS:
            continue
        for phase in PHASES:
            samples[phase].append(after[phase][1] * 1e3)
        samples["fixed_cost"].append(samples["transfer"][-1] + samples["import"][-1])
    return samples


def measured(name: str, model_dir: Path, requests: int) -> dict[str, Any]:
    roles = {"p0": "prefill", "d0": "decode"}
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder), model_dir, roles=roles, compute_dtype="float32") as cluster,
    ):
        page_bytes = cluster.status()["page_bytes"]
        samples = sampled_ms(cluster, model_dir, requests)
    return {
        "model": name,
        "page_bytes": page_bytes,
        **{f"{phase}_ms": summary(taken) for phase, taken in samples.items()},
        "samples_ms": {
            phase: [round(each, 3) for each in taken] for phase, taken in samples.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = [
            measured(name, model_dir, options.requests)
            for name, model_dir in models(options.model, Path(scratch)).items()
        ]
    met = all(each["fixed_cost_ms"]["median"] <= TARGET_MS for each in results)
    report = {
        "method": __doc__,
        "prompt_tokens": PROMPT_TOKENS,
        "requests": options.requests,
        "target_ms": TARGET_MS,
        "met": met,
        "machine": machine("mlx", "mlx-lm", "numpy"),
        "results": results,
    }
    path = write(options.output, "handoff_fixed_cost", report)
    for each in results:
        print(f"{each['model']}, {PROMPT_TOKENS} tokens, page of {each['page_bytes']} B")
        for phase in (*PHASES, "fixed_cost"):
            taken = each[f"{phase}_ms"]
            print(f"  {phase:12} median {taken['median']:8.3f} ms  p95 {taken['p95']:8.3f} ms")
    print(f"target {TARGET_MS:g} ms in the median: {'met' if met else 'missed'}; {path}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
