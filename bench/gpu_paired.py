"""Whether one way costs more than another: samples by turns, and how sure their difference is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000
LEAST = 30
"""Pairs before anything is said to be decided."""

Pairs = np.ndarray[Any, np.dtype[np.float64]]


def loss_of(plain_ms: Sequence[float], other_ms: Sequence[float], bound: float) -> dict[str, Any]:
    """How much longer the other takes, as a share of the plain one's median: the median of the
    differences within pairs, with its bootstrap interval (99 %, since one may look again and
    again while samples come). `decided` is "within" or "over" the bound where the whole interval
    is, else None."""
    number = min(len(plain_ms), len(other_ms))
    if not number:
        return {"pairs": 0, "decided": None}
    plain, other = np.asarray(plain_ms[:number]), np.asarray(other_ms[:number])
    drawn = np.random.default_rng(0).integers(0, number, (RESAMPLES, number))
    low, high = np.quantile(_losses(plain[drawn], other[drawn]), (0.005, 0.995))
    decided = "within" if high <= bound else "over" if low > bound else None
    return {
        "pairs": number,
        "plain_ms": round(float(np.median(plain)), 3),
        "other_ms": round(float(np.median(other)), 3),
        "loss": round(float(_losses(plain[None], other[None])[0]), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
        "bound": bound,
        "decided": decided if number >= LEAST else None,
    }


def _losses(plain: Pairs, other: Pairs) -> Pairs:
    """Of each row."""
    return np.median(other - plain, axis=1) / np.median(plain, axis=1)


def said(loss: dict[str, Any]) -> str:
    """For a table."""
    if not loss["pairs"]:
        return "–"
    low, high = loss["interval"]
    verdict = loss["decided"] or "not decided"
    return f"{loss['loss']:+.1%} ({low:+.1%} to {high:+.1%}), {verdict}"
