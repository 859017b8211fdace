"""Page memory from one allocation: runs, and what keeps them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.handoff.arena import Arena, Bytes, arena_of
from pdctl.handoff.budget import Budget, Claim
from pdctl.handoff.page import PageGeometry


def arena(size: int) -> Arena[Bytes]:
    return arena_of(np.zeros(size, np.uint8))


def test_a_run_is_part_of_the_memory() -> None:
    """What is written into a run stands in the allocation that it is of."""
    memory = np.zeros(10, np.uint8)
    source = arena_of(memory)
    kept = source.take(4)
    run = source.take(3)
    assert kept is not None
    assert run is not None
    run[:] = 7
    assert memory.tolist() == [0, 0, 0, 0, 7, 7, 7, 0, 0, 0]


def test_runs_come_back_when_the_last_array_over_them_dies() -> None:
    """An array that the engine still holds is never given to another prompt, however it was cut
    and shaped."""
    source = arena(8)
    run = source.take(8)
    assert run is not None
    view = run.view("<u2").reshape(2, 2)[1:]
    del run
    assert source.take(1) is None
    del view
    assert source.take(8) is not None


def test_neighbours_that_came_back_are_one_run_again() -> None:
    """Whatever the order in which they come back, nothing stays in pieces."""
    source = arena(12)
    runs = [source.take(4) for _ in range(3)]
    assert source.take(1) is None
    runs[1] = None
    assert source.take(5) is None
    runs[0] = None
    both = source.take(8)
    assert both is not None
    runs[2] = None
    del both
    assert source.take(12) is not None


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=60))
def test_runs_never_overlap(steps: list[tuple[int, int]]) -> None:
    """Any order of taking and giving back: each held run keeps its own bytes."""
    source = arena(100)
    held: dict[int, np.ndarray] = {}
    for turn, (size, slot) in enumerate(steps):
        held.pop(slot, None)
        run = source.take(size)
        if run is not None:
            run[:] = turn % 251 + 1
            held[slot] = run
    for run in held.values():
        assert len(set(run.tolist())) == 1
    held.clear()
    run = None
    assert source.take(100) is not None


class Claims:
    """A budget of 100 bytes with as much memory."""

    def __init__(self) -> None:
        self.budget = Budget(100, arena=arena(100))
        self.granted: list[str] = []

    def ask(self, name: str, size: int) -> Claim:
        claim = self.budget.claim(size, self._noting(name))
        self.budget.start(claim)
        return claim

    def _noting(self, name: str) -> Callable[[], None]:
        return lambda: self.granted.append(name)


def test_a_claim_waits_for_one_run_and_others_behind_it() -> None:
    """R41: bytes in two places are no run; the claim waits in order, is passed by nobody, and gets
    its memory once there is one."""
    claims = Claims()
    first, second, third = claims.ask("a", 30), claims.ask("b", 40), claims.ask("c", 30)
    first.release()
    third.release()
    wide, small = claims.ask("wide", 60), claims.ask("small", 10)
    assert claims.granted == ["a", "b", "c"]
    second.release()
    assert claims.granted == ["a", "b", "c", "wide", "small"]
    assert wide.memory is not None
    assert small.memory is not None
    assert (wide.memory.nbytes, small.memory.nbytes) == (60, 10)


def test_memory_that_outlives_its_claim_is_waited_for() -> None:
    """R10: a released claim whose memory the engine still holds makes room for nobody until that
    is let go."""
    claims = Claims()
    first = claims.ask("a", 80)
    held, first.memory = first.memory, None
    first.release()
    claims.ask("b", 50)
    claims.budget.look_again()
    assert claims.granted == ["a"]
    del held
    claims.budget.look_again()
    assert claims.granted == ["a", "b"]


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128])
def test_pages_in_used_memory_have_a_clean_tail(tokens: int) -> None:
    """R30: slots past the prompt are zero, whatever the memory held before."""
    geometry = PageGeometry(layers=2, kv_heads=1, head_dim=4)
    size = geometry.pages_for(tokens) * geometry.page_bytes
    pages = geometry.over(np.full(size, 0xFF, np.uint8), tokens)
    assert pages.shape == (geometry.pages_for(tokens), *geometry.shape)
    slots = (pages.any(axis=(1, 2, 4, 5))).reshape(-1)
    assert slots.tolist() == [True] * tokens + [False] * (len(slots) - tokens)
