"""Paths: declared, preferred, chosen, pinned."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime.router.cluster import plan_of

from pdctl.runtime.router.failure import RequestFailed
from pdctl.runtime.router.policy import (
    Candidate,
    Path,
    choose,
    declared_paths,
    pinned,
    preferred,
)
from pdctl.topology.model import Policy

PATHS = declared_paths(plan_of("p0 p1 d0 o0"))
candidates = st.lists(
    st.builds(
        Candidate,
        st.builds(Path, st.sampled_from(["p0", "p1"]), st.sampled_from(["d0", "d1"])),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=6,
)


def test_declared_paths_are_the_pairs_and_then_the_ordinary_replicas() -> None:
    """R71: an ordinary replica is a path of its own, whatever the pairs are."""
    assert [path.text for path in PATHS] == ["p0>d0", "p1>d0", "o0"]


def test_pairs_are_preferred_and_an_ordinary_replica_serves_when_none_is_ready() -> None:
    """R71: no ready pair never idles a healthy ordinary replica."""
    assert [path.text for path in preferred(PATHS)] == ["p0>d0", "p1>d0"]
    assert [path.text for path in preferred(PATHS[2:])] == ["o0"]


@given(candidates, st.integers(0, 10**9))
def test_round_robin_takes_each_in_turn(found: list[Candidate], turn: int) -> None:
    picked = Counter(choose(found, Policy.ROUND_ROBIN, turn + i).text for i in range(len(found)))
    assert picked == Counter(candidate.path.text for candidate in found)


@given(candidates, st.integers(0, 10**9))
def test_least_loaded_never_takes_a_busier_one(found: list[Candidate], turn: int) -> None:
    def busiest(candidate: Candidate) -> int:
        return max(candidate.prefill_load, candidate.decode_load)

    picked = choose(found, Policy.LEAST_LOADED, turn)
    least = min(busiest(candidate) for candidate in found)
    assert picked in {c.path for c in found if busiest(c) == least}


def test_ties_of_least_loaded_go_round() -> None:
    found = [Candidate(Path("p0", "d0")), Candidate(Path("p1", "d0"))]
    assert {choose(found, Policy.LEAST_LOADED, turn).text for turn in range(2)} == {
        "p0>d0",
        "p1>d0",
    }


@pytest.mark.parametrize("text", ["p0>d0", " p1>d0 ", "o0"])
def test_a_pin_names_a_declared_path(text: str) -> None:
    assert pinned(text, PATHS).text == text.strip()


@pytest.mark.parametrize("text", ["", "p0", "d0", "d0>p0", "p9>d0", "p0>d0>o0", "\x00ÿ" * 99])
def test_any_other_pin_is_a_400_that_lists_the_paths(text: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        pinned(text, PATHS)
    assert caught.value.status == 400
    assert "p0>d0, p1>d0, o0" in caught.value.message
    assert caught.value.message.isprintable()
