"""What `gpu_pairs.py` measured, as figures, JSON and one Markdown table."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_ways import Taken

import pdctl

PACED_TARGET = 1.15
FLOOR_TARGET = 1.25
FIXED_COST_TARGET_MS = 20.0
IDLE_LOSS_TARGET = 0.02

Cells = dict[int, dict[str, "Cell"]]


class Cell:
    """One way's answers to prompts of one length."""

    def __init__(self) -> None:
        self.taken: list[Taken] = []

    def add(self, taken: Taken) -> None:
        self.taken.append(taken)

    @property
    def texts(self) -> list[str]:
        return [each.sample.text for each in self.taken]

    def summary(self) -> dict[str, Any]:
        samples = [each.sample for each in self.taken]
        errors = [sample.error for sample in samples if sample.error]
        if errors:
            return {"errors": errors}
        ttft_ms = sorted(s.ttft_s * 1e3 for s in samples if s.ttft_s is not None)
        steps_ms = [s.tpot_s * 1e3 for s in samples if s.tpot_s is not None]
        found: dict[str, Any] = {
            "ttft_ms": round(statistics.median(ttft_ms), 2),
            "ttft_p95_ms": round(_p95(ttft_ms), 2),
            "ttft_min_ms": round(ttft_ms[0], 2),
            "tpot_ms": round(statistics.median(steps_ms), 2) if steps_ms else None,
            "samples_ms": [round(value, 2) for value in ttft_ms],
        }
        return {**found, **self._moved()}

    def _moved(self) -> dict[str, Any]:
        moved = [each.moved for each in self.taken if each.moved is not None]
        if not moved or not any(each.handoffs_completed for each in moved):
            return {}
        phases: dict[str, list[float]] = {}
        for each in moved:
            for name, phase in each.phases.items():
                phases.setdefault(name, []).append(phase.sum_s / phase.count * 1e3)
        return {
            "host_bytes": statistics.median(each.host_bytes for each in moved),
            "imported_tokens": statistics.median(each.imported_tokens for each in moved),
            "phases_ms": {name: round(statistics.median(ms), 2) for name, ms in phases.items()},
        }


def report_of(
    cells: Cells,
    idle: Cells,
    sizes: dict[int, int],
    rates: dict[int, float],
    *,
    paced: tuple[str, int],
) -> dict[str, Any]:
    rows = {
        tokens: {name: cell.summary() for name, cell in row.items()}
        for tokens, row in cells.items()
    }
    for tokens, row in rows.items():
        for name, figures in row.items():
            if ">" in name and "ttft_ms" in figures:
                rate = paced[1] if name.startswith(paced[0]) else rates[sizes[tokens]]
                figures.update(_against_floor(name, figures, row, sizes[tokens] / rate * 1e3))
                figures["same_text"] = _agreement(cells[tokens], name)
    return {
        "rows": rows,
        "idle_loss": {tokens: _idle_loss(row) for tokens, row in idle.items()},
        "loopback_gb_per_s": {size: round(rate / 1e9, 2) for size, rate in rates.items()},
        "handoff_bytes": sizes,
    }


def _against_floor(
    name: str, figures: dict[str, Any], row: dict[str, Any], link_ms: float
) -> dict[str, Any]:
    alone = "vllm"
    if name.startswith("m"):
        alone = "mlx" if "mlx" in row else "md"
    decode = name.partition(">")[2]
    prefill_ms = row.get(alone, {}).get("ttft_ms")
    step_ms = row.get(decode if decode in row else "vd", {}).get("tpot_ms")
    if prefill_ms is None or step_ms is None:
        return {}
    floor_ms = max(prefill_ms, link_ms) + step_ms
    return {
        "link_ms": round(link_ms, 2),
        "floor_ms": round(floor_ms, 2),
        "of_floor": round(figures["ttft_ms"] / floor_ms, 3),
        "fixed_cost_ms": round(figures["ttft_ms"] - prefill_ms - step_ms, 2),
    }


def _agreement(row: dict[str, Cell], name: str) -> str:
    """Of a pair's answers, how many are the decode replica's own."""
    own = row.get(name.partition(">")[2])
    if own is None:
        return "no baseline"
    pairs = list(zip(row[name].texts, own.texts, strict=False))
    return f"{sum(a == b for a, b in pairs)}/{len(pairs)}"


def _idle_loss(row: dict[str, Cell]) -> dict[str, Any]:
    plain, idle = row["vllm"].summary(), row["vp idle"].summary()
    if "ttft_ms" not in plain or "ttft_ms" not in idle:
        return {"vllm": plain, "vp idle": idle}
    return {
        "ordinary_ms": plain["ttft_ms"],
        "prefill_ms": idle["ttft_ms"],
        "loss": round(idle["ttft_ms"] / plain["ttft_ms"] - 1, 4),
        "ordinary_samples_ms": plain["samples_ms"],
        "prefill_samples_ms": idle["samples_ms"],
    }


def _p95(ordered: list[float]) -> float:
    if len(ordered) < 2:
        return ordered[0]
    return statistics.quantiles(ordered, n=20, method="inclusive")[18]


def write(
    folder: Path, checkpoint: str, method: str, setting: dict[str, str], measured: dict[str, Any]
) -> Iterator[Path]:
    """`DATE-gpu-pairs-CHECKPOINT.json` and `.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    graphs = "-graphs" if setting["graphs"] == "True" else ""
    today = datetime.date.today().isoformat()
    stem = folder / f"{today}-gpu-pairs-{checkpoint}{graphs}"
    whole = {
        "benchmark": "gpu_pairs",
        "date": today,
        "method": method,
        "machine": machine(),
        "setting": {k: v for k, v in setting.items() if "python" not in k and k not in PATHS},
        "targets": {
            "of_floor": FLOOR_TARGET,
            "fixed_cost_ms": FIXED_COST_TARGET_MS,
            "idle_loss": IDLE_LOSS_TARGET,
            "of_floor_paced": PACED_TARGET,
        },
        **measured,
    }
    path = stem.with_name(stem.name + ".json")
    path.write_text(json.dumps(whole, indent=1) + "\n")
    yield path
    path = stem.with_name(stem.name + ".md")
    path.write_text(markdown(checkpoint, measured))
    yield path


PATHS = ("logs", "output", "checkpoint")


def machine() -> dict[str, Any]:
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        card = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        card = ""
    return {
        "gpu": card or None,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "pdctl": pdctl.__version__,
    }


def markdown(checkpoint: str, measured: dict[str, Any]) -> str:
    rows = measured["rows"]
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [
        f"TTFT of {checkpoint}, median (p95) in ms; in brackets × the floor, of the same run.",
        "",
        "| way | " + " | ".join(f"{tokens} tokens" for tokens in rows) + " |",
        "|---|" + "---:|" * len(rows),
    ]
    for name in names:
        cells = [_cell(row.get(name, {})) for row in rows.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    losses = ", ".join(
        f"{each['loss']:+.1%} at {tokens}"
        for tokens, each in measured["idle_loss"].items()
        if "loss" in each
    )
    return "\n".join([*lines, "", f"Connector on, nothing to send: {losses}."]) + "\n"


def _cell(figures: dict[str, Any]) -> str:
    if "ttft_ms" not in figures:
        return "failed" if figures else "–"
    text = f"{figures['ttft_ms']:.1f} ({figures['ttft_p95_ms']:.1f})"
    return text + (f" [{figures['of_floor']:.2f}]" if "of_floor" in figures else "")
