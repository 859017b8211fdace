"""A measurement ends in time, and says what it left out."""

from __future__ import annotations

from collections.abc import Iterator


class Clock:
    """Seconds that go on when they are told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def budget(seconds: float) -> Iterator[object]:
    from gpu_budget import Budget

    clock = Clock()
    yield Budget(seconds, clock)
    yield clock


def test_a_cell_that_fits_is_begun_and_one_that_does_not_is_named_once() -> None:
    """What was left out is told, however often it was asked for."""
    some, clock = budget(60.0)
    assert some.allows("first", 59.0)
    clock.now_s += 50.0
    assert some.used_s == 50.0
    assert not some.allows("second", 20.0)
    assert not some.allows("second", 20.0)
    assert some.allows("third", 5.0)
    clock.now_s += 50.0
    assert some.left_s == 0.0
    assert not some.allows("fourth")
    assert some.left_out == ["second", "fourth"]


def test_a_part_is_a_share_of_what_is_left_and_tells_the_whole() -> None:
    some, clock = budget(60.0)
    clock.now_s += 20.0
    part = some.part(0.5)
    assert part.left_s == 20.0
    clock.now_s += 20.0
    assert not part.allows("of the part")
    assert some.allows("of the whole", 10.0)
    assert some.left_out == ["of the part"]
