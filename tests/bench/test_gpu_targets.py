"""Pairs under load are held against what stood beside them in the same run, or against nothing."""

from __future__ import annotations

from typing import Any

import pytest


def rounds(rate: float, p50: float, tail: float, step: float = 5.0) -> list[dict[str, Any]]:
    """Two, whose medians these are."""
    figures = {
        "output_tokens_per_s": rate,
        "ttft_p50_ms": p50,
        "ttft_p95_ms": tail,
        "tpot_p50_ms": step,
    }
    return [{name: value * by for name, value in figures.items()} for by in (0.9, 1.1)]


def ways() -> dict[str, dict[int, list[dict[str, Any]]]]:
    return {
        "ordinary vllm": {1: rounds(300, 30.0, 40.0, step=5.0)},
        "ordinary sglang": {1: rounds(300, 40.0, 40.0)},
        "vp>vd native": {16: rounds(2000, 170, 200)},
        "sp>sd native": {16: rounds(1600, 190, 300)},
        "vp>vd nixl": {16: rounds(1900, 160, 230), 1: rounds(260, 42.0, 80)},
        "vp>sd nixl": {16: rounds(1840, 140, 250), 1: rounds(300, 33.0, 60)},
        "vp>vd tcp": {16: rounds(1300, 270, 350)},
    }


def test_each_ratio_has_its_target() -> None:
    """An SGLang decode has no step before its first token; TCP is held against nothing."""
    from gpu_targets import targets

    found = {(each.way, each.what): each for each in targets(ways())}
    told = {
        ("vp>vd nixl", "tokens/s at 16 ÷ its own handoff"): (0.95, False),
        ("vp>vd nixl", "p95 at 16 ÷ the better own handoff"): (1.15, True),
        ("vp>vd nixl", "p50 at 1 ÷ P alone + D's step"): (1.2, False),
        ("vp>sd nixl", "tokens/s at 16 ÷ the slower own handoff"): (1.15, True),
        ("vp>sd nixl", "tokens/s at 16 ÷ the faster own handoff"): (0.92, True),
        ("vp>sd nixl", "p95 at 16 ÷ the better own handoff"): (1.25, False),
        ("vp>sd nixl", "p50 at 1 ÷ P alone + D's step"): (1.1, True),
    }
    assert set(found) == set(told)
    for name, (ratio, met) in told.items():
        assert found[name].ratio == pytest.approx(ratio)
        assert found[name].met is met, name


def test_without_what_it_is_held_against_nothing_is_said() -> None:
    from gpu_targets import targets

    alone = {name: each for name, each in ways().items() if name.endswith("nixl")}
    assert targets(alone) == []


def test_a_target_is_said_in_a_line() -> None:
    from gpu_targets import Target

    assert str(
        Target("vp>vd nixl", "tokens/s at 16 ÷ its own handoff", 0.953, 0.97, most=False)
    ) == ("vp>vd nixl: tokens/s at 16 ÷ its own handoff 0.95, ≥ 0.97: missed")
