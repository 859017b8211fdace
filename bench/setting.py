"""What the benches start from and end in: checkpoints, the machine, samples, the result file."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
sys.path.insert(0, str(ROOT / "tests"))

from e2e.cluster import OPENBLAS, PDCTL  # noqa: E402
from tiny import make_checkpoint  # noqa: E402


def models(asked: Path | None, scratch: Path) -> dict[str, Path]:
    """The checkpoint that was asked for; else the demo model and a tiny random one."""
    if asked is not None:
        return {asked.name: asked}
    done = subprocess.run([PDCTL, "demo-model"], check=True, capture_output=True, text=True)
    demo = Path(done.stdout.strip().splitlines()[-1])
    return {demo.name: demo, "tiny-llama": make_checkpoint(scratch / "tiny-llama", "llama")}


def summary(taken: list[float]) -> dict[str, float]:
    ordered = sorted(taken)
    return {
        "median": round(statistics.median(ordered), 3),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 3),
        "min": round(ordered[0], 3),
        "max": round(ordered[-1], 3),
    }


def machine(*packages: str) -> dict[str, Any]:
    """Where this runs, with the versions of pdctl and of these packages."""
    return {
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "openblas_preloaded": OPENBLAS.exists(),
        "versions": {name: version(name) for name in ("pdctl", *packages)},
    }


def cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def write(folder: Path, benchmark: str, report: dict[str, Any]) -> Path:
    """`DATE-BENCHMARK.json` in that folder; the report is preceded by its name and date."""
    today = datetime.date.today().isoformat()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{today}-{benchmark.replace('_', '-')}.json"
    whole = {"benchmark": benchmark, "date": today, **report}
    path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return path
