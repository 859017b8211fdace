"""The floor that a pair is held against is that of its own engines, bytes and rate."""

from __future__ import annotations

from typing import Any

import pytest

from pdctl.runtime.bench.client import Sample

TOKENS, BYTES = 2844, 35_400_000


def cell(ttft_ms: float, step_ms: float = 0.0, error: str | None = None) -> Any:
    from gpu_report import Cell
    from gpu_ways import Taken

    found = Cell()
    whole_s = (ttft_ms + 5 * step_ms) / 1e3
    found.add(
        Taken(
            Sample(
                started_s=0.0,
                ttft_s=ttft_ms / 1e3,
                e2el_s=whole_s,
                output_tokens=6,
                text="same",
                error=error,
            )
        )
    )
    return found


def figures(row: dict[str, Any], rate: float = 4e9) -> dict[str, Any]:
    from gpu_floor import figures_of

    return dict(figures_of({TOKENS: row}, {TOKENS: BYTES}, {BYTES: rate})[TOKENS])


def test_a_long_prefill_is_the_floor_and_a_long_transfer_is() -> None:
    """Whichever is longer, and D's step of D alone."""
    row = {"vllm": cell(40.0), "vd": cell(44.0, 10.0), "vp>vd": cell(100.0)}
    found = figures(row)["vp>vd"]
    assert found["floor_ms"] == pytest.approx(50.0)
    assert found["of_floor"] == pytest.approx(2.0)
    assert found["fixed_cost_ms"] == pytest.approx(50.0)
    assert found["same_text"] == "1/1"
    slow = figures(row, rate=0.5e9)["vp>vd"]
    assert slow["floor_ms"] == pytest.approx(70.8 + 10.0)


def test_a_paced_replica_has_the_rate_that_it_is_paced_to() -> None:
    from gpu_floor import PACED_BYTES_PER_S

    row = {"vllm": cell(40.0), "md": cell(30.0, 8.0), "vpq>md": cell(350.0)}
    found = figures(row)["vpq>md"]
    assert found["link_ms"] == pytest.approx(BYTES / PACED_BYTES_PER_S * 1e3, abs=0.01)


def test_an_sglang_decode_waits_for_no_step_of_its_own() -> None:
    """It shows P's first token."""
    row = {"vllm": cell(40.0), "sglang": cell(44.0, 20.0), "vp>sd": cell(60.0)}
    assert figures(row)["vp>sd"]["floor_ms"] == pytest.approx(40.0)


def test_without_an_engine_alone_there_is_no_floor() -> None:
    """A decode replica of MLX stands for MLX alone; none stands for SGLang."""
    row = {"md": cell(30.0, 8.0), "vd": cell(40.0, 10.0), "mp>vd": cell(90.0), "sp>md": cell(80.0)}
    found = figures(row)
    assert found["mp>vd"]["floor_ms"] == pytest.approx(40.0)
    assert "floor_ms" not in found["sp>md"]


def test_a_way_that_failed_twice_is_given_up_and_shown_as_failed() -> None:
    """What it answered before counts."""
    from gpu_floor import table

    broken = cell(1.0, error="502: gone")
    assert not broken.given_up
    broken.add(broken.taken[0])
    assert broken.given_up
    assert broken.summary() == {"errors": ["502: gone"] * 2}
    shown = table("title", {TOKENS: {"vp>vd": broken.summary(), "vllm": cell(40.0).summary()}})
    assert "| vp>vd | failed |" in shown
    assert "| vllm | 40.0 (40.0) |" in shown
