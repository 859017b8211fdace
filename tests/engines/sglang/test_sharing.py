"""Prompts of ordinary replicas beside a real page store, with stand-ins for SGLang's queue, radix
tree and blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from engines.sglang.standins import BLOCKS, IDS, Req, Side
from handoff.store.stores import Host, clients


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path / "s.sock")
    yield made
    # a test may have closed it
    with contextlib.suppress(OSError):
        made.close()


@pytest.fixture
def sides(store: Host) -> Iterator[tuple[Side, Side]]:
    with clients(store.path) as (a, b):
        yield Side(a, 1), Side(b, 2)


def computed(side: Side, ids: Sequence[int] = IDS, salt: str | None = None) -> Req:
    req = side.come(ids, salt)
    side.ready(req)
    side.compute(req)
    side.rest()
    return req


def test_what_one_replica_computes_another_finds_in_its_tree(sides: tuple[Side, Side]) -> None:
    """R25, U7: whole pages, once they have landed; every lock is given back."""
    a, b = sides
    first = computed(a)
    a.stored(4)
    second = b.come()
    assert b.sharing.look() == [second]
    assert b.ready(second) == 3
    assert np.array_equal(b.pages(second), a.pages(first))
    assert b.pool.flushed == 1
    assert (a.tree.locks, b.tree.locks, b.sharing.moving) == ([], [], 0)
    assert b.client.board.read().reused_tokens == 192


def test_a_handoff_that_keeps_nothing_goes_past_the_store(sides: tuple[Side, Side]) -> None:
    """`pdctl_cache` false: it is computed whole, and nobody gets it."""
    a, b = sides
    computed(a)
    a.stored(4)
    req = b.come()
    req.sampling_params.custom_params = {"pdctl_cache": False}
    assert b.sharing.look() == []
    b.compute(req)
    b.rest()
    assert b.client.board.read().stored_pages == 0


def test_the_partial_tail_is_stored_for_engines_that_can_use_it(
    sides: tuple[Side, Side], store: Host
) -> None:
    """Its page holds the prompt's last eight tokens and zeros (R30)."""
    a, b = sides
    computed(a)
    a.stored(4)
    loan = b.client.store.hold(b.client.store.prompt(IDS))
    assert loan.tokens == 200
    tail = loan.pages[3]
    assert np.array_equal(tail[:, :, :8], a.pool.cells[BLOCKS - 1][:, :, :8])
    assert not tail[:, :, 8:].any()
    loan.release()


def test_another_question_adds_only_its_own_pages(sides: tuple[Side, Side]) -> None:
    """R45: what the store has is not copied out again."""
    a, b = sides
    computed(a)
    a.stored(4)
    other = computed(b, [*range(150), *range(900, 942)])
    b.stored(1)
    assert b.tree.held(other, 3).pages == 3
    assert b.client.board.read().stored_pages == 1


def test_a_prompt_in_the_own_tree_is_not_looked_for(sides: tuple[Side, Side]) -> None:
    """Nor one of a page or less; neither waits."""
    a, _ = sides
    computed(a)
    again, short = a.come(), a.come(range(500, 564))
    assert a.sharing.look() == []
    assert (a.ready(again), a.ready(short)) == (3, 0)


def test_the_last_token_is_computed_whatever_is_stored(sides: tuple[Side, Side]) -> None:
    """U16: of a prompt of whole pages, the last one is left to be computed."""
    a, b = sides
    computed(a, range(128))
    a.stored(2)
    assert b.ready(b.come(range(128))) == 1


def test_salted_prompts_are_isolated(sides: tuple[Side, Side]) -> None:
    """R48: the same tokens under another salt are a miss."""
    a, b = sides
    computed(a, salt="one")
    a.stored(4)
    assert b.ready(b.come(salt="two")) == 0
    assert b.ready(b.come()) == 0
    assert b.ready(b.come(salt="one")) == 3


def test_a_request_that_is_aborted_while_it_waits_holds_nothing(
    sides: tuple[Side, Side], store: Host
) -> None:
    """U7: neither a page of the store nor a block."""
    a, b = sides
    computed(a)
    a.stored(4)
    b.come()
    b.sharing.look()
    b.scheduler.waiting_queue.clear()
    b.until(lambda: store.shelves.counts().loans == 0)
    b.rest()
    assert (b.tree.locks, len(b.tree.free) + len(b.tree.blocks)) == ([], BLOCKS)


def test_no_free_blocks_is_a_miss(sides: tuple[Side, Side], store: Host) -> None:
    """SGLang queues the request for them itself."""
    a, b = sides
    computed(a)
    a.stored(4)
    b.tree.free = [1]
    assert b.ready(b.come()) == 0
    b.until(lambda: store.shelves.counts().loans == 0)
    assert b.tree.locks == []


def test_a_store_that_is_away_is_a_miss(store: Host, sides: tuple[Side, Side]) -> None:
    """Each prompt is computed."""
    a, _ = sides
    store.close()
    a.client.connect(wanted=False)
    computed(a)
    assert a.client.board.read().stored_pages == 0
    assert a.tree.locks == []


@pytest.mark.parametrize("side", ["in", "out"])
def test_a_copy_that_fails_fails_no_request(
    sides: tuple[Side, Side], store: Host, side: str
) -> None:
    """R34, R35: blocks, locks and loans are given back."""
    a, b = sides
    a.pool.breaks = side == "out"
    computed(a)
    if side == "in":
        a.stored(4)
    b.pool.breaks = side == "in"
    assert b.ready(b.come()) == 0
    b.until(lambda: store.shelves.counts().loans == 0)
    for each in sides:
        assert (each.tree.locks, each.sharing.moving) == ([], 0)
        assert len(each.tree.free) + len(each.tree.blocks) == BLOCKS


def test_a_store_that_dies_under_a_loan_is_a_miss(
    store: Host, sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was copied does not reach the tree."""
    a, b = sides
    computed(a)
    a.stored(4)

    def dies() -> None:
        store.close()
        b.client.connect(wanted=False)

    monkeypatch.setattr(b.pool, "flush", dies)
    assert b.ready(b.come()) == 0
    assert (b.tree.locks, len(b.tree.free)) == ([], BLOCKS)


def test_a_prompt_that_can_not_be_looked_for_is_computed(sides: tuple[Side, Side]) -> None:
    """R34: and the others of the queue wait no longer for it."""
    a, _ = sides
    bad, good = a.come([-1] * 100), a.come()
    assert (a.ready(bad), a.ready(good)) == (0, 0)


def test_a_retracted_request_is_not_looked_for_again(sides: tuple[Side, Side]) -> None:
    """Its prompt was computed here before."""
    a, _ = sides
    req = a.come()
    req.output_ids.append(1)
    assert a.sharing.look() == []
