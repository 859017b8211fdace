"""What `/status` shows of decisions, and of what the paths cost. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from pdctl.runtime.cost.deciding import REASONS
from pdctl.runtime.router.judge import Judge


def verdicts(judge: Judge, replicas: list[str], now: float) -> dict[str, Any]:
    """`now`: Unix seconds."""
    decider = judge.decider
    return {
        "decisions": {
            "decides": judge.decides,
            "decided": decider.decided,
            "reasons": {reason: decider.by_reason[reason] for reason in REASONS},
            "expected_s": round(decider.expected_s, 6),
            "exploring_s": round(decider.exploring_s, 6),
            "queued_tokens": {name: judge.queues.prompt_tokens(name) for name in replicas},
            "latest": msgspec.to_builtins(tuple(reversed(judge.recent))),
        },
        "costs": [_cost(judge, path, now) for path in sorted(judge.book.records)],
    }


def _cost(judge: Judge, path: str, now: float) -> dict[str, Any]:
    record, curve = judge.book.record(path), judge.book.curve(path)
    told = {
        "path": path,
        "samples": len(record.samples) if record else 0,
        "round_trip_s": record.round_trip_s if record else None,
    }
    step_s = judge.book.step_s(path.split(">")[-1])
    if curve is None:
        return {**told, "fixed_s": None, "step_s": step_s}
    return {
        **told,
        "fixed_s": curve.fixed_s,
        "token_s": curve.linear_s,
        "token_squared_s": curve.quadratic_s,
        "longest_tokens": round(curve.longest),
        "drift": round(judge.book.drift(path, round(curve.longest), now), 4),
        "step_s": step_s,
    }
