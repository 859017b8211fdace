"""The ways that `gpu_transfer_tcp.py` measures, and what is told of them."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from gpu_report import grid
from gpu_transfer_cpu import Spent
from gpu_transfer_tcp_ends import PLACES, Took
from piece_copies import COPIES, Spot

from pdctl.handoff.page import PageGeometry

LANDINGS = ("landed", "by layer")
HANDOFFS = {f"{landing}, {place}": (landing, place) for landing in LANDINGS for place in PLACES}
COPY_WAYS = {f"{kind} copy, {landing}": (kind, landing) for landing in LANDINGS for kind in COPIES}
SCATTERS = {f"scatter, {landing}": landing for landing in LANDINGS}
WAYS = (*HANDOFFS, *COPY_WAYS, "gather", *SCATTERS)


class Taken(NamedTuple):
    """One way, once."""

    seconds: float
    cpu_s: dict[str, float]
    spots: list[Spot]
    after_last_s: float | None = None
    sustained_s: float | None = None
    late_layers: int = 0


def parts(engine: Spent, plane: Spent | None, there: Took) -> dict[str, float]:
    """Seconds of a core by thread and process."""
    found = {
        "prefill: engine thread": engine.main_s,
        "prefill: engine process": engine.whole_s,
        "prefill: sending thread": (plane or engine).busiest_s,
        "decode: engine process": there.engine.whole_s,
        "decode: placing": there.placing_s,
    }
    if plane is None or there.plane is None:
        found["decode: receiving thread"] = max(0.0, there.engine.passing_s - there.placing_s)
        return found
    return {
        **found,
        "prefill: data plane": plane.whole_s,
        "decode: landing": max(0.0, there.engine.passing_s - there.placing_s),
        "decode: receiving thread": there.plane.passing_s,
        "decode: data plane": there.plane.whole_s,
    }


def summary(taken: list[Taken], geometry: PageGeometry, tokens: int) -> dict[str, Any]:
    size = geometry.pages_for(tokens) * geometry.page_bytes
    ms = [each.seconds * 1e3 for each in taken]
    pieces = statistics.mean(len(each.spots) for each in taken)
    cpu_ms = {
        name: statistics.mean(each.cpu_s[name] for each in taken) * 1e3 for name in taken[0].cpu_s
    }
    found: dict[str, Any] = {
        "ms": round(statistics.median(ms), 3),
        "gb_per_s": round(size / statistics.median(ms) / 1e6, 2),
        "cpu_ms": {name: round(each, 2) for name, each in cpu_ms.items()},
        "samples_ms": [round(each, 3) for each in ms],
    }
    if pieces:
        found["pieces"] = round(pieces)
        found["piece_bytes"] = round(size / pieces)
        found["cpu_us_per_piece"] = {
            name: round(each * 1e3 / pieces, 1) for name, each in cpu_ms.items()
        }
    after_s = [each.after_last_s for each in taken if each.after_last_s is not None]
    sustained_s = [each.sustained_s for each in taken if each.sustained_s is not None]
    if after_s and sustained_s:
        found["after_last_ms"] = round(statistics.median(after_s) * 1e3, 3)
        found["sustained_gb_per_s"] = round(size / statistics.median(sustained_s) / 1e9, 2)
        found["late_layers"] = statistics.median(each.late_layers for each in taken)
    return found


def table(shape: str, results: list[dict[str, Any]]) -> list[str]:
    """Milliseconds with GB/s; then pieces, and microseconds of a core for each of them."""
    heads = [f"{each['tokens']} tokens" for each in results]
    every = [each["ways"] for each in results]
    rows = {
        way: [f"{ways[way]['ms']:.2f} ({ways[way]['gb_per_s']:.2f})" for ways in every]
        for way in WAYS
    }
    spent: dict[str, list[str]] = {}
    for way in (*HANDOFFS, *COPY_WAYS, *SCATTERS):
        first = every[0][way]
        spent[f"**{way}**: pieces (KiB)"] = [
            f"{ways[way]['pieces']} ({ways[way]['piece_bytes'] / 1024:.0f})" for ways in every
        ]
        if "after_last_ms" in first:
            rows[f"{way}: after the last layer (sustained)"] = [
                f"{ways[way]['after_last_ms']:.2f} ({ways[way]['sustained_gb_per_s']:.2f})"
                for ways in every
            ]
        for name in first["cpu_us_per_piece"]:
            spent[f"{way}: {name}"] = [
                f"{ways[way]['cpu_us_per_piece'][name]:.1f}" for ways in every
            ]
    return [
        f"{shape} shape over TCP, ms (GB/s), medians",
        "",
        *grid("way", heads, rows),
        "",
        "µs of a core for each piece, means",
        "",
        *grid("of", heads, spent),
        "",
    ]
