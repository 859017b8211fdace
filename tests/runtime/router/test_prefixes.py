"""Where prefixes were computed, and what that is worth against load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdctl.runtime.router.policy import Candidate, Path
from pdctl.runtime.router.prefixes import SHARED, Prefixes, computing, nearest

A, B = Path(None, "a"), Path(None, "b")
PAIR = Path("p", "d")


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_only_leading_pages_count() -> None:
    known = Prefixes()
    known.computed("a", keys("1", "2", "3"), 4)
    assert known.missing("a", keys("1", "2", "3")) == 1
    assert known.missing("a", keys("1", "2", "x", "3")) == 3
    assert known.missing("a", keys("x", "2", "3")) == 4
    assert known.missing("b", keys("1", "2", "3")) == 4


def test_chain_tails_are_forgotten_before_heads() -> None:
    known = Prefixes(pages=3)
    known.computed("a", keys("1", "2"), 1)
    known.computed("a", keys("1", "3", "4"), 1)
    assert known.missing("a", keys("1", "3", "4")) == 1
    assert known.missing("a", keys("1", "2")) == 2


def test_a_restarted_replica_holds_nothing() -> None:
    known = Prefixes()
    known.computed("a", keys("1"), 1)
    known.forget("a")
    assert known.missing("a", keys("1")) == 2


def test_replicas_of_one_store_read_each_other() -> None:
    """They would rather have their own, which costs nothing."""
    known = Prefixes(shared=frozenset({"a", "b"}))
    known.computed("a", keys("1", "2"), 1)
    assert known.missing("a", keys("1", "2")) == 1
    assert known.missing("b", keys("1", "2")) == 1 + 2 * SHARED
    assert known.missing("c", keys("1", "2")) == 3


def test_the_holder_is_near_until_waiting_costs_more() -> None:
    """Ten pages against requests of four pages each: two may wait there, a third may not."""
    missing = {A: 1.0, B: 11.0}
    loads = [
        nearest([Candidate(A, decode_load=load), Candidate(B)], missing, 4.0, turn=0)
        for load in range(4)
    ]
    assert loads == [A, A, A, B]


def test_equals_go_round() -> None:
    candidates = [Candidate(A), Candidate(B)]
    taken = [nearest(candidates, {A: 2.0, B: 2.0}, 1.0, turn) for turn in range(4)]
    assert taken == [A, B, A, B]


def test_a_pair_computes_where_its_prefill_is() -> None:
    assert (computing(PAIR), computing(A)) == ("p", "a")


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 6), max_size=6)), max_size=30
    ),
    st.integers(1, 8),
)
def test_what_is_remembered_is_bounded_and_was_computed(
    served: list[tuple[str, list[int]]], limit: int
) -> None:
    known = Prefixes(pages=limit)
    given_to: dict[str, set[bytes]] = {name: set() for name in "abc"}
    for replica, pages in served:
        chain = keys(*(str(pages[: end + 1]) for end in range(len(pages))))
        known.computed(replica, chain, len(chain) + 1)
        given_to[replica] |= set(chain)
        for name in "abc":
            held = len(chain) + 1 - known.missing(name, chain)
            assert 0 <= held <= min(limit, len(chain))
            assert set(chain[: int(held)]) <= given_to[name]
    assert known.usual >= 1
