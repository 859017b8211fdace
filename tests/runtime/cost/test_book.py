"""What is known of the paths, and how soon it follows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.runtime.cost.book import FADES_S, Book
from pdctl.runtime.cost.record import KEPT, PathRecord, Sample

FRESH = PathRecord(identity="i", contract="c", versions=("1",))


def book(*known: tuple[int, float]) -> Book:
    made = Book()
    made.open("d0", FRESH)
    for at, (tokens, seconds) in enumerate(known):
        made.sampled("d0", Sample(tokens=tokens, ttft_s=seconds, at=float(at)))
    return made


KNOWN = ((50, 0.1), (200, 0.4), (800, 1.6))


def expected(made: Book, tokens: int = 200, now: float = 100.0) -> float:
    found = made.expected_s("d0", tokens, now)
    assert found is not None
    return found


def test_nothing_is_expected_of_what_was_not_measured() -> None:
    assert Book().expected_s("d0", 100, 0.0) is None
    made = Book()
    made.sampled("d0", Sample(tokens=100, ttft_s=1.0, at=0.0))
    assert made.expected_s("d0", 100, 0.0) is None


def test_two_slow_answers_of_five_change_nothing_and_three_do() -> None:
    made = book(*KNOWN)
    before = expected(made)
    for factor in (1, 5, 1, 5, 1):
        made.seen("d0", 200, factor * before, before, 100.0)
    assert expected(made) == pytest.approx(before, rel=0.01)
    for _ in range(2):
        made.seen("d0", 200, 5 * before, before, 100.0)
    assert expected(made) == pytest.approx(5 * before, rel=0.01)


def test_half_of_the_answers_change_nothing() -> None:
    made = book(*KNOWN)
    made.seen("d0", 200, 0.4, 0.4, 100.0)
    made.seen("d0", 200, 4.0, 0.4, 100.0)
    assert expected(made) == pytest.approx(0.4, rel=0.02)
    made = book(*KNOWN)
    made.seen("d0", 200, 4.0, 0.4, 100.0)
    made.seen("d0", 200, 0.8, 0.4, 100.0)
    assert expected(made) == pytest.approx(0.8, rel=0.02)


def test_a_small_drift_is_left_to_the_curve() -> None:
    made = book(*KNOWN)
    for _ in range(5):
        made.seen("d0", 200, 0.44, 0.4, 100.0)
    assert made.drift("d0", 200, 100.0) == 1.0


def test_a_drift_is_of_its_own_lengths() -> None:
    """A slow link shows with long prompts."""
    made = book(*KNOWN)
    for tokens, factor in ((50, 1.0), (50, 1.0), (800, 4.0), (800, 4.0)):
        made.seen("d0", tokens, factor * tokens * 0.002, tokens * 0.002, 100.0)
    assert expected(made, 50) == pytest.approx(0.1, rel=0.02)
    assert expected(made, 800) == pytest.approx(6.4, rel=0.02)


def test_a_queue_that_was_expected_is_no_drift() -> None:
    made = book(*KNOWN)
    for _ in range(3):
        made.seen("d0", 200, 3.0, 3.0, 100.0)
    assert expected(made) == pytest.approx(0.4, rel=0.02)


def test_a_drift_that_nothing_confirms_fades() -> None:
    made = book(*KNOWN)
    for _ in range(3):
        made.seen("d0", 200, 1.6, 0.4, 100.0)
    assert expected(made, now=100.0) == pytest.approx(1.6, rel=0.02)
    assert expected(made, now=100.0 + FADES_S) == pytest.approx(0.8, rel=0.02)


def test_samples_that_say_the_same_for_long_become_the_curve() -> None:
    made = book(*KNOWN)
    for at in range(KEPT):
        made.sampled("d0", Sample(tokens=200, ttft_s=1.2, at=50.0 + at))
    curve = made.curve("d0")
    assert curve is not None
    assert curve.at(200) == pytest.approx(1.2, rel=0.25)


@given(st.lists(st.tuples(st.integers(2, 8000), st.floats(1e-4, 1e2)), max_size=60))
def test_samples_are_bounded_per_class_of_length(found: list[tuple[int, float]]) -> None:
    made = book(*found)
    record = made.record("d0")
    assert record is not None
    assert len(record.samples) <= KEPT * 26
    assert [s.at for s in record.samples] == sorted(s.at for s in record.samples)


def test_another_version_of_an_engine_begins_anew() -> None:
    made = book(*KNOWN)
    made.open("d0", FRESH)
    assert made.curve("d0") is not None
    made.open("d0", PathRecord(identity="i", contract="c", versions=("2",)))
    assert made.curve("d0") is None


def test_a_step_is_the_replicas_own_by_whatever_path() -> None:
    made = Book()
    for path in ("d0", "p0>d0", "o0"):
        made.open(path, FRESH)
    for path, step_s in (("d0", 0.02), ("p0>d0", 0.04), ("p0>d0", 0.03), ("o0", 9.0)):
        made.stepped(path, step_s)
    assert made.step_s("d0") == pytest.approx(0.03)
    assert made.step_s("d1") is None
