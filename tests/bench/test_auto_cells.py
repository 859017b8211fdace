"""Cells of `auto`: whole rounds in every order, and what their medians are held against."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest


class Clock:
    """A second goes by each time it is looked at."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        self._now_s += 1.0
        return self._now_s


@pytest.mark.parametrize(("within_s", "rounds"), [(float("inf"), 8), (2.0, 5), (0.0, 3)])
def test_a_cell_takes_whole_rounds_and_no_less_than_three(
    monkeypatch: pytest.MonkeyPatch, within_s: float, rounds: int
) -> None:
    """Also where time is over before the first; each prompt is asked once."""
    import auto_cells

    asked: list[tuple[str, str | None]] = []

    async def answered(http: Any, url: str, model: str, prompt: str, pin: str | None) -> str:
        asked.append((prompt, pin))
        return prompt

    monkeypatch.setattr(auto_cells, "asked", answered)
    monkeypatch.setattr(auto_cells, "time", Clock())
    paths = auto_cells.Paths("vd", "vp>vd")
    found = asyncio.run(
        auto_cells.cell("", "m", paths, lambda turn, place: f"{turn} {place}", 8, within_s=within_s)
    )
    assert {name: len(each) for name, each in found.items()} == dict.fromkeys(
        ("auto", "vd", "vp>vd"), rounds
    )
    assert len({prompt for prompt, _ in asked}) == len(asked) == 3 * rounds
    firsts = {pin for prompt, pin in asked if prompt.endswith(" 0")}
    assert firsts >= {None, "vd"}


def cell(ratio: float, *, off: float = 0.1, tokens: int = 51) -> dict[str, Any]:
    return {
        "link_bytes_per_s": 117,
        "prompt_tokens": tokens,
        "ttft_ms": {"vd": 100.0},
        "auto_of_better": ratio,
        "expected_off": off,
    }


def plan(ttft_ms: float) -> dict[str, Any]:
    path = {"path": "vd", "cells": [{"tokens": 51, "ttft_ms": ttft_ms}]}
    return {"link_bytes_per_s": 117, "forecast": {"paths": [path]}}


@pytest.mark.parametrize(
    ("ratios", "planned_ms", "met"),
    [
        ([1.0] * 19 + [2.0], 110.0, True),
        ([1.0] * 18 + [2.0, 2.0], 110.0, False),
        ([1.0] * 20, 140.0, False),
    ],
)
def test_nineteen_of_twenty_cells_and_a_plan_that_is_near(
    ratios: list[float], planned_ms: float, met: bool
) -> None:
    from auto_cells import said, verdict

    found = verdict([cell(ratio) for ratio in ratios], [plan(planned_ms)])
    assert found["met"] is met
    assert said(found, 20).endswith("met" if met else "missed")
