"""Curves: three terms, none negative, robust."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.runtime.cost.curve import Point, fit, length_class, medians

LENGTHS = (51, 184, 744, 1500)
parts = st.tuples(
    st.floats(1e-4, 0.1),
    st.floats(1e-6, 1e-2),
    st.one_of(st.just(0.0), st.floats(1e-9, 1e-6)),
)
samples = st.lists(
    st.tuples(st.integers(1, 100_000), st.floats(1e-5, 1e3)), min_size=1, max_size=24
)


def valued(terms: tuple[float, float, float], tokens: float) -> float:
    fixed, linear, quadratic = terms
    return fixed + linear * tokens + quadratic * tokens**2


@given(parts)
def test_a_curve_of_the_family_is_found_again(terms: tuple[float, float, float]) -> None:
    curve = fit([Point(n, valued(terms, n)) for n in LENGTHS])
    assert curve is not None
    for tokens in (51, 100, 400, 1000, 1500, 2800):
        assert curve.at(tokens) == pytest.approx(valued(terms, tokens), rel=0.02)


@given(parts, st.sampled_from(LENGTHS), st.floats(3, 100))
def test_one_slow_answer_of_five_moves_nothing(
    terms: tuple[float, float, float], where: int, factor: float
) -> None:
    calm = [(n, valued(terms, n)) for n in LENGTHS for _ in range(5)]
    disturbed = [*calm, (where, factor * valued(terms, where))]
    disturbed.remove((where, valued(terms, where)))
    first, second = fit(medians(calm)), fit(medians(disturbed))
    assert first is not None
    assert second is not None
    assert second.at(where) == pytest.approx(first.at(where), rel=1e-6)


@given(samples)
def test_no_term_is_negative_and_every_time_is_above_zero(found: list[tuple[int, float]]) -> None:
    curve = fit(medians(found))
    assert curve is not None
    assert min(curve.fixed_s, curve.linear_s, curve.quadratic_s) >= 0
    assert all(curve.at(n) > 0 for n in (1, 64, 5000, 200_000))


def test_one_length_gives_a_straight_line() -> None:
    """Twice the tokens take twice as long, as far as one length can tell."""
    curve = fit([Point(100, 0.2)])
    assert curve is not None
    assert curve.at(200) == pytest.approx(0.4)


def test_nothing_gives_no_curve() -> None:
    assert fit([]) is None


def test_a_step_that_the_family_has_not_is_kept_where_it_was_measured() -> None:
    points = [Point(n, s, 5) for n, s in ((51, 0.01), (184, 0.012), (744, 0.2), (1500, 0.21))]
    curve = fit(points)
    assert curve is not None
    for point in points:
        assert curve.at(point.tokens) == pytest.approx(point.seconds, rel=0.25)


def test_lengths_within_a_fifth_are_of_one_or_neighbouring_classes() -> None:
    assert length_class(744) == length_class(700)
    assert length_class(184) != length_class(744)
