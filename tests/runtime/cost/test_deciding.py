"""The choice: the faster path, calmly, and with bounded curiosity."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.runtime.cost.deciding import (
    EVERY,
    EXPLORED,
    FASTER,
    HELD,
    HELD_ON,
    ONLY,
    SHARE,
    UNMEASURED,
    WORTH,
    Decider,
    Option,
)

seconds = st.floats(1e-3, 100.0)


def options(**times: float | None) -> list[Option]:
    """`pd` is the pair p0>d0."""
    return [Option(path="p0>d0" if n == "pd" else n, total_s=s) for n, s in times.items()]


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=200))
def test_whatever_comes_exploring_costs_a_bounded_share(times: list[tuple[float, float]]) -> None:
    decider = Decider()
    best = explored = 0.0
    for pair, alone in times:
        decision = decider.decide(options(pd=pair, d0=alone), 100)
        best += min(pair, alone)
        if decision.reason == EXPLORED:
            explored += decision.expected_s[decision.path] - min(pair, alone)
    assert explored <= SHARE * best * (1 + 1e-9)
    assert decider.by_reason[EXPLORED] <= len(times) / EVERY
    assert decider.decided == len(times)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=100))
def test_what_is_not_exploring_is_within_the_margin_of_the_best(
    times: list[tuple[float, float]],
) -> None:
    decider = Decider()
    for pair, alone in times:
        decision = decider.decide(options(pd=pair, d0=alone), 100)
        taken, best = decision.expected_s[decision.path], min(pair, alone)
        if decision.reason == FASTER:
            assert taken == best
        elif decision.reason == HELD_ON:
            assert taken * (1 - HELD) <= best


@given(st.floats(1 - HELD / 2, 1 + HELD / 2), st.integers(2, EVERY - 1))
def test_a_difference_within_the_margin_never_flaps(ratio: float, turns: int) -> None:
    decider = Decider()
    first = decider.decide(options(pd=1.0, d0=2.0), 100)
    assert first.path == "p0>d0"
    paths = {
        decider.decide(options(pd=1.0, d0=ratio if turn % 2 else 1.0), 100).path
        for turn in range(min(turns, EVERY - 2))
    }
    assert paths == {"p0>d0"}


def test_each_class_of_lengths_has_its_own_habit() -> None:
    decider = Decider()
    assert decider.decide(options(pd=2.0, d0=1.0), 50).path == "d0"
    assert decider.decide(options(pd=1.0, d0=2.0), 1500).path == "p0>d0"
    assert decider.decide(options(pd=0.99, d0=1.0), 50).reason == HELD_ON


@pytest.mark.parametrize(("slower", "least"), [(1.2, 1), (2.0, 1), (5.0, 1)])
def test_a_slower_path_is_looked_at_now_and_then(slower: float, least: int) -> None:
    """The slower, the more rarely: twice as slow is one request in fifty."""
    decider = Decider()
    found = Counter(decider.decide(options(pd=1.0, d0=slower), 100).path for _ in range(250))
    assert least <= found["d0"] <= 250 * SHARE / (slower - 1) + 1


def test_a_path_that_was_never_measured_is_tried_once_per_class_of_lengths() -> None:
    decider = Decider()
    reasons = [decider.decide(options(pd=None, d0=1.0), 100) for _ in range(4)]
    assert [d.reason for d in reasons] == [UNMEASURED, ONLY, ONLY, ONLY]
    assert reasons[0].path == "p0>d0"
    assert decider.decide(options(pd=None, d0=1.0), 1000).reason == UNMEASURED


def test_what_is_extrapolated_is_tried_once_where_it_may_be_the_best() -> None:
    """Per class of lengths, and not where it is expected to be far slower."""
    decider = Decider()
    for slower, tried in ((WORTH * 0.99, True), (WORTH * 1.01, False)):
        far = [
            Option(path="p0>d0", total_s=slower, extrapolated=True),
            Option(path="d0", total_s=1.0),
        ]
        tokens = 1000 if tried else 4000
        taken = [decider.decide(far, tokens) for _ in range(5)]
        assert [d.reason == UNMEASURED for d in taken] == [tried, *[False] * 4]
        assert {d.path for d in taken[1:]} == {"d0"}


def test_the_only_path_is_taken() -> None:
    decision = Decider().decide(options(d0=None), 100)
    assert (decision.path, decision.reason) == ("d0", ONLY)


def test_a_pair_that_left_is_taken_no_more_and_again_when_it_is_back() -> None:
    """A dead prefill replica: the very next request goes alone."""
    decider = Decider()
    assert decider.decide(options(pd=1.0, d0=2.0), 100).path == "p0>d0"
    assert decider.decide(options(d0=2.0), 100).path == "d0"
    assert decider.decide(options(pd=1.0, d0=2.0), 100).path == "p0>d0"


def test_equal_paths_of_one_kind_take_turns() -> None:
    decider = Decider()
    both = [Option(path=path, total_s=1.0) for path in ("p0>d0", "p1>d0")]
    assert {decider.decide(both, 100).path for _ in range(4)} == {"p0>d0", "p1>d0"}


def test_a_decision_says_what_was_expected() -> None:
    """Three figures are enough, and none of them is an exponent."""
    decision = Decider().decide(options(pd=0.0412, d0=1.2235), 744)
    assert decision.text == "faster; tokens=744 p0>d0=41.2ms d0=1224ms"


def test_no_path_is_no_choice() -> None:
    with pytest.raises(ValueError, match="no option"):
        Decider().decide([], 100)
