"""Prompts of ordinary replicas beside a real page store, with stand-ins for SGLang's queue, radix
tree and blocks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from handoff.store.stores import GEOMETRY, WAIT_S, Host, Replica, clients

from pdctl.engines.sglang.sharing import Sharing
from pdctl.handoff.page import Patterns

BLOCKS = 16
IDS = list(range(200))
"""Three pages and a tail of eight tokens."""


class Req:
    def __init__(self, ids: Sequence[int], salt: str | None = None) -> None:
        self.rid, self.origin_input_ids = "r", list(ids)
        self.cache_salt, self.extra_key = salt, None
        self.output_ids: list[int] = []


class Held(NamedTuple):
    blocks: list[int]

    @property
    def pages(self) -> int:
        return len(self.blocks)


class Tree:
    """Blocks by the tokens up to their end; `locks` are those taken and not given back."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[Any, ...], int] = {}
        self.free = list(range(BLOCKS))
        self.locks: list[Held] = []
        self.tails: dict[int, int] = {}

    def held(self, req: Req, pages: int) -> Held:
        found = []
        for stop in range(64, pages * 64 + 1, 64):
            block = self.blocks.get((req.cache_salt, *req.origin_input_ids[:stop]))
            if block is None:
                break
            found.append(block)
        return Held(found)

    def lock(self, held: Held) -> Held:
        self.locks.append(held)
        return held

    def unlock(self, lock: Held) -> None:
        self.locks.remove(lock)

    def take(self, pages: int) -> Any:
        if len(self.free) < pages:
            return None
        blocks, self.free = self.free[:pages], self.free[pages:]
        return SimpleNamespace(blocks=blocks, free_after="before")

    def give_back(self, taken: Any) -> None:
        self.free += taken.blocks

    def insert(self, req: Req, held: Held, taken: Any) -> None:
        for page, block in enumerate(taken.blocks, held.pages + 1):
            self.blocks[req.cache_salt, *req.origin_input_ids[: page * 64]] = block

    def tail_block(self, req: Req, tokens: int) -> int | None:
        return self.tails.get(id(req)) if tokens % 64 else None


class Pool:
    def __init__(self, seed: int) -> None:
        shape = (BLOCKS, *GEOMETRY.shape)
        self.cells = np.random.default_rng(seed).integers(1, 9999, shape).astype(np.uint16)
        self.waited: list[Any] = []
        self.breaks = False

    def wait(self, events: Any) -> None:
        self.waited.append(events)

    def read(self, blocks: Sequence[int], first: int, last_slots: int, into: Patterns) -> None:
        if self.breaks:
            raise RuntimeError("the device is gone")
        into[first : first + len(blocks)] = self.cells[list(blocks)]
        into[first + len(blocks) - 1, :, :, last_slots:] = 0

    def write(self, block: int, slots: range, first_layer: int, piece: Patterns) -> None:
        if self.breaks:
            raise RuntimeError("the device is gone")
        self.cells[block, :, :, slots.start : slots.stop] = piece[:, :, slots.start : slots.stop]


class Side:
    """One replica's scheduler."""

    def __init__(self, replica: Replica, seed: int) -> None:
        self.client = replica
        self.tree, self.pool = Tree(), Pool(seed)
        self.scheduler = SimpleNamespace(waiting_queue=[])
        self.sharing = Sharing(
            self.scheduler,
            replica.store,
            self.pool,
            self.tree,
            GEOMETRY,  # type: ignore[arg-type]
        )

    def come(self, ids: Sequence[int] = IDS, salt: str | None = None) -> Req:
        req = Req(ids, salt)
        self.scheduler.waiting_queue.append(req)
        return req

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline
            self.sharing.look()

    def ready(self, req: Req) -> int:
        """Lets it through, and tells how many of its pages are in the tree by then."""
        self.until(lambda: req not in self.sharing.look())
        return self.tree.held(req, len(req.origin_input_ids) // 64).pages

    def compute(self, req: Req) -> None:
        """In one step; its result goes into the tree as SGLang does it."""
        self.scheduler.waiting_queue.remove(req)
        count = len(req.origin_input_ids)
        held = self.tree.held(req, count // 64)
        taken = self.tree.take(count // 64 - held.pages)
        self.tree.tails[id(req)] = BLOCKS - 1
        begun = self.sharing.begin([req])
        req.output_ids.append(1)
        self.tree.insert(req, held, taken)
        self.sharing.end(begun)

    def rest(self) -> None:
        self.until(lambda: self.sharing.moving == 0)

    def pages(self, req: Req) -> Patterns:
        return self.pool.cells[self.tree.held(req, len(req.origin_input_ids) // 64).blocks]

    def stored(self, pages: int) -> None:
        self.until(lambda: self.client.board.read().stored_pages >= pages)


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
    assert b.pool.waited == ["before"]
    assert (a.tree.locks, b.tree.locks, b.sharing.moving) == ([], [], 0)
    assert b.client.board.read().reused_tokens == 192


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

    def dies(events: Any) -> None:
        store.close()
        b.client.connect(wanted=False)

    monkeypatch.setattr(b.pool, "wait", dies)
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
