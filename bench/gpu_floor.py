"""A pair's TTFT against what it can't be below: `max(P alone, bytes / rate) + D's step`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_report import Cell, grid

TARGETS = {"of_floor": 1.25, "of_floor_paced": 1.15, "fixed_cost_ms": 20.0}
PACED = "vpq"
PACED_BYTES_PER_S = 117_000_000
"""A saturated gigabit link."""
ENGINES = {"v": "vllm", "s": "sglang", "m": "mlx"}
"""By the first letter of a replica's name."""

Cells = dict[int, dict[str, Cell]]


def figures_of(
    cells: Cells, sizes: Mapping[int, int], rates: Mapping[int, float]
) -> dict[int, dict[str, Any]]:
    """By length and way, pairs with their floor.

    Args:
        sizes: bytes of a handoff by prompt length.
        rates: of a plain copy, bytes per second by size.
    """
    rows = {
        tokens: {name: cell.summary() for name, cell in row.items()}
        for tokens, row in cells.items()
    }
    for tokens, row in rows.items():
        for name, figures in row.items():
            if ">" in name and "ttft_ms" in figures:
                rate = PACED_BYTES_PER_S if name.startswith(PACED) else rates[sizes[tokens]]
                figures.update(_against_floor(name, row, sizes[tokens] / rate * 1e3))
                figures["same_text"] = _agreement(cells[tokens], name)
    return rows


def _against_floor(name: str, row: Mapping[str, Any], link_ms: float) -> dict[str, Any]:
    prefill, _, decode = name.partition(">")
    engine = ENGINES[prefill[0]]
    alone = row.get(engine) or row.get({"mlx": "md"}.get(engine, ""), {})
    prefill_ms, step_ms = alone.get("ttft_ms"), _step_ms(decode, row)
    if prefill_ms is None or step_ms is None:
        return {}
    floor_ms = max(prefill_ms, link_ms) + step_ms
    ttft_ms = row[name]["ttft_ms"]
    return {
        "link_ms": round(link_ms, 2),
        "step_ms": step_ms,
        "floor_ms": round(floor_ms, 2),
        "of_floor": round(ttft_ms / floor_ms, 3),
        "fixed_cost_ms": round(ttft_ms - prefill_ms - step_ms, 2),
    }


def _step_ms(decode: str, row: Mapping[str, Any]) -> float | None:
    """An SGLang decode shows P's first token and computes none before it."""
    engine = ENGINES[decode[0]]
    if engine == "sglang":
        return 0.0
    found = row.get(decode) or row.get(engine, {})
    return found.get("tpot_ms")


def _agreement(row: Mapping[str, Cell], name: str) -> str:
    """Of a pair's answers, how many are the decode engine's own."""
    decode = name.partition(">")[2]
    own = row.get(decode) or row.get(ENGINES[decode[0]])
    if own is None:
        return "no baseline"
    pairs = list(zip(row[name].texts, own.texts, strict=False))
    return f"{sum(a == b for a, b in pairs)}/{len(pairs)}"


def table(title: str, rows: Mapping[int, Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    heads = [f"{tokens} tokens" for tokens in rows]
    shown = {name: [_shown(row.get(name, {})) for row in rows.values()] for name in names}
    return [title, "", *grid("way", heads, shown)]


def _shown(figures: Mapping[str, Any]) -> str:
    if "ttft_ms" not in figures:
        return "failed" if figures else "–"
    text = f"{figures['ttft_ms']:.1f} ({figures['ttft_p95_ms']:.1f})"
    return text + (f" [{figures['of_floor']:.2f}]" if "of_floor" in figures else "")
