"""Whether an idle connector or a page store costs time is decided from pairs, or it is not."""

from __future__ import annotations

import random

import pytest


def pairs(loss: float, scatter_ms: float, number: int) -> tuple[list[float], list[float]]:
    """Around 40 ms; both of a pair meet the same drift of the machine."""
    chance = random.Random(1)
    drift = [40 + 10 * chance.random() for _ in range(number)]
    noise = [chance.gauss(0, scatter_ms) for _ in range(number)]
    return drift, [each * (1 + loss) + off for each, off in zip(drift, noise, strict=True)]


@pytest.mark.parametrize(
    ("loss", "scatter_ms", "number", "decided"),
    [
        (0.0, 0.5, 60, "within"),
        (0.10, 0.5, 60, "over"),
        (0.02, 0.5, 60, None),
        (0.0, 20.0, 60, None),
        (0.10, 0.5, 29, None),
    ],
)
def test_a_loss_is_decided_where_its_whole_interval_is_on_one_side(
    loss: float, scatter_ms: float, number: int, decided: str | None
) -> None:
    """Scatter, nearness to the bound and too few pairs leave it open."""
    from gpu_paired import loss_of, said

    found = loss_of(*pairs(loss, scatter_ms, number), 0.02)
    assert found["decided"] == decided
    assert found["pairs"] == number
    low, high = found["interval"]
    assert low <= found["loss"] <= high
    assert (decided or "not decided") in said(found)


def test_drift_that_both_meet_is_not_taken_for_a_loss() -> None:
    """By medians of each alone a tenth of these 40 to 50 ms would be lost in it."""
    from gpu_paired import loss_of

    found = loss_of(*pairs(0.01, 0.0, 60), 0.02)
    assert found["loss"] == pytest.approx(0.01, abs=0.001)


def test_nothing_is_said_of_no_pairs() -> None:
    from gpu_paired import loss_of, said

    assert loss_of([], [1.0], 0.02) == {"pairs": 0, "decided": None}
    assert said(loss_of([], [], 0.02)) == "–"
