"""Goodput as `vllm bench serve` counts it: requests per second that meet every objective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pdctl.errors import UsageError
from pdctl.runtime.bench.client import Sample

METRICS = ("ttft", "tpot", "e2el")


def objectives(texts: Sequence[str]) -> dict[str, float]:
    """ "ttft:500" and "tpot:50" as {"ttft": 500.0, "tpot": 50.0}, in milliseconds; UsageError for
    anything else."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, limit = text.partition(":")
        if name not in METRICS:
            raise UsageError(
                f"--goodput knows {', '.join(METRICS)}, not {name!r}",
                hint="for example --goodput ttft:500 tpot:50",
            )
        if name in found:
            raise UsageError(f"--goodput names {name} twice")
        found[name] = _milliseconds(text, limit)
    return found


def request_goodput(
    good: Sequence[Sample], duration_s: float, limits_ms: Mapping[str, float]
) -> float | None:
    """Requests per second, of those that succeeded, within every limit; None without limits.
    The TPOT of an answer of one token is zero."""
    if not limits_ms:
        return None
    met = sum(all(_ms(s, name) <= limit for name, limit in limits_ms.items()) for s in good)
    return met / duration_s if duration_s > 0 else 0.0


def _milliseconds(text: str, limit: str) -> float:
    try:
        value = float(limit)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(
            f"--goodput needs milliseconds, not {text!r}",
            hint="for example --goodput ttft:500 tpot:50",
        )
    return value


def _ms(sample: Sample, name: str) -> float:
    seconds = {"ttft": sample.ttft_s, "tpot": sample.tpot_s, "e2el": sample.e2el_s}[name]
    return (seconds or 0.0) * 1000
