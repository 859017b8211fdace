"""The worker half of ordinary replicas beside a real page store: pages out of one replica's blocks
and into another's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines.vllm.sides import BLOCK, Memory, Side
from handoff.store.stores import CONTRACT, Host, Replica, clients

from pdctl.engines.vllm.steps import Export, Finish, News, Notice, Place, Seek, Step
from pdctl.handoff.store.interface import Loan

CHUNK = 100
"""Positions that a step computes: neither pages nor blocks of them."""
OTHERS = [3, 9, 4, 1, 7, 12, 2, 8]
"""Blocks of the prompt on the replica that computes it."""
OURS = [20, 5, 11, 6, 30, 14, 22, 17]


class Sharer(Side):
    def __init__(self, replica: Replica, seed: int, memory: Memory | None = None) -> None:
        self.client = replica
        assigned = SimpleNamespace(contract=CONTRACT)
        super().__init__("o", seed, memory, store=replica.store, assigned=assigned)
        self.session.board = replica.board

    def seek(self, ids: Sequence[int], salt: str = "", name: str = "r") -> int:
        """How many of the prompt's positions need not be computed."""
        self.step(seek=[Seek(request_id=name, token_ids=list(ids), salt=salt)])
        self.until(lambda: self.found(name) is not None)
        found = self.found(name)
        assert found is not None
        return found

    def found(self, name: str) -> int | None:
        of = [n.tokens for n in self.notices if (n.request_id, n.news) == (name, News.FOUND)]
        return of[0] if of else None

    def compute(self, ids: Sequence[int], blocks: list[int], name: str = "r") -> None:
        """The whole prompt, step by step, and its end."""
        for at in range(0, len(ids), CHUNK):
            positions = min(at + CHUNK, len(ids))
            held = blocks[: -(-positions // BLOCK)]
            self.step(export=[Export(request_id=name, blocks=held, positions=positions)])
        self.step(finish=[Finish(request_id=name, first_token=1)])

    def give(self, ids: Sequence[int], salt: str = "") -> None:
        """The store gets this prompt, of which it has nothing."""
        assert self.seek(ids, salt) == 0
        self.compute(ids, OTHERS)
        self.stored(-(-len(ids) // 64))

    def fill(self, tokens: int, held: int, blocks: list[int]) -> set[int]:
        """Blocks that were not filled."""
        private = blocks[held // BLOCK : -(-tokens // BLOCK)]
        place = Place(request_id="r", blocks=blocks, held_tokens=held, private=private)
        self.step(place=[place])
        self.until(lambda: "r" in self.loaded)
        return self.lost

    def cells(self, blocks: Sequence[int], start: int, stop: int) -> Any:
        at = range(start, stop)
        return np.stack([self.memory.cells[blocks[n // BLOCK], :, :, n % BLOCK] for n in at])

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
def sharers(store: Host) -> Iterator[tuple[Sharer, Sharer]]:
    with clients(store.path) as (a, b):
        made = Sharer(a, 1), Sharer(b, 2)
        yield made
        for side in made:
            side.half.close()


def test_what_one_replica_computes_another_need_not(sharers: tuple[Sharer, Sharer]) -> None:
    """R25: all positions but the last, the partial tail's included; the rest is left alone."""
    a, b = sharers
    ids = list(range(200))
    a.give(ids)
    assert b.seek(ids) == 199
    last = b.cells(OURS, 199, 224)
    assert b.fill(199, 0, OURS) == set()
    assert np.array_equal(b.cells(OURS, 0, 199), a.cells(OTHERS, 0, 199))
    assert np.array_equal(b.cells(OURS, 199, 224), last)
    assert b.client.board.read().reused_tokens == 199


def test_another_question_reuses_the_pages_that_it_shares(sharers: tuple[Sharer, Sharer]) -> None:
    """Whole pages; what it adds is stored, and only that (R45)."""
    a, b = sharers
    first, second = list(range(200)), [*range(150), *range(900, 950)]
    a.give(first)
    assert b.seek(second) == 128
    assert b.fill(128, 0, OURS) == set()
    b.compute(second, OURS)
    b.stored(2)
    assert b.client.board.read().stored_pages == 2
    assert a.seek(second, name="again") == 199


def test_positions_of_the_own_prefix_cache_are_not_written(
    sharers: tuple[Sharer, Sharer],
) -> None:
    """R26: blocks that others share stay byte-identical."""
    a, b = sharers
    ids = list(range(200))
    a.give(ids)
    b.seek(ids)
    before = b.cells(OURS, 0, 96)
    assert b.fill(199, 96, OURS) == set()
    assert np.array_equal(b.cells(OURS, 0, 96), before)
    assert np.array_equal(b.cells(OURS, 96, 199), a.cells(OTHERS, 96, 199))


def test_salted_prompts_are_isolated(sharers: tuple[Sharer, Sharer]) -> None:
    """R48: the same tokens under another salt are a miss."""
    a, b = sharers
    ids = list(range(200))
    a.give(ids, salt="one")
    assert b.seek(ids, salt="two", name="two") == 0
    assert b.seek(ids, name="none") == 0
    assert b.seek(ids, salt="one", name="one") == 199


def test_a_store_that_is_away_is_a_miss(store: Host, sharers: tuple[Sharer, Sharer]) -> None:
    """Each prompt is computed, and its pages go nowhere."""
    a, _ = sharers
    store.close()
    a.client.connect(wanted=False)
    ids = list(range(200))
    assert a.seek(ids) == 0
    a.compute(ids, OTHERS)
    assert a.client.board.read().stored_pages == 0


def test_a_store_that_dies_under_a_loan_leaves_its_blocks_to_be_computed(
    store: Host, sharers: tuple[Sharer, Sharer]
) -> None:
    """What was copied may be of a page that another has written since."""
    a, b = sharers
    ids = list(range(200))
    a.give(ids)
    assert b.seek(ids) == 199
    store.close()
    b.client.connect(wanted=False)
    assert b.fill(199, 64, OURS) == set(OURS[2:7])


def test_a_copy_that_fails_leaves_its_blocks_to_be_computed(
    sharers: tuple[Sharer, Sharer], store: Host
) -> None:
    """R34: the request goes on, and the loan is given back."""
    a, b = sharers
    ids = list(range(200))
    a.give(ids)
    b.seek(ids)
    b.memory.breaks = True
    assert b.fill(199, 0, OURS) == set(OURS[:7])
    b.until(lambda: store.shelves.counts().loans == 0)


def test_an_aborted_request_gives_its_pages_back(
    sharers: tuple[Sharer, Sharer], store: Host
) -> None:
    """R46 holds for as long as somebody waits for them, and no longer: before an answer, and
    after it."""
    a, b = sharers
    ids = list(range(200))
    a.give(ids)
    b.seek(ids)
    gone = Seek(request_id="gone", token_ids=ids, salt="")
    b.step(seek=[gone], finish=[Finish(request_id=n, first_token=None) for n in ("gone", "r")])
    b.until(lambda: store.shelves.counts().loans == 0)
    assert b.loaded == set()


def test_an_export_that_fails_stores_nothing_more_of_its_prompt(
    sharers: tuple[Sharer, Sharer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R35: a page behind one that is missing would never be found; the step goes on."""
    a, b = sharers
    ids = list(range(200))
    a.seek(ids)
    with monkeypatch.context() as broken:
        broken.setattr(Memory, "gather", lambda *_: 1 / 0)
        a.step(export=[Export(request_id="r", blocks=OTHERS, positions=100)])
    a.compute(ids, OTHERS)
    assert b.seek(ids) == 0


def test_a_prompt_that_can_not_be_looked_for_is_computed(sharers: tuple[Sharer, Sharer]) -> None:
    """Its tokens are none, say; the worker's thread lives (R34)."""
    a, _ = sharers
    assert a.seek([-1] * 100) == 0
    a.compute([-1] * 100, OTHERS)


def test_nothing_waits_for_a_slow_publication(
    sharers: tuple[Sharer, Sharer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R35: a store that takes no more ends what is stored of a prompt, not its steps."""
    a, _ = sharers
    asked: list[int] = []
    monkeypatch.setattr(
        a.client.store, "publish_soon", lambda keys, pages, parent: bool(asked.append(len(keys)))
    )
    ids = list(range(300))
    a.seek(ids)
    a.compute(ids, [*OTHERS, 13, 15])
    assert asked == [1]


def test_without_a_store_every_prompt_is_a_miss() -> None:
    """Where the scheduler's half asks all the same."""
    side = Side("o", 1)
    side.half.obey(Step(seek=[Seek(request_id="r", token_ids=[1] * 100, salt="")]))
    side.collect()
    assert side.notices == [Notice(request_id="r", news=News.FOUND, tokens=0)]


def test_a_loan_that_comes_after_the_end_is_released(
    sharers: tuple[Sharer, Sharer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would."""
    a, _ = sharers
    told: list[Any] = []
    monkeypatch.setattr(a.client.store, "hold_soon", lambda prompt, tell: told.append(tell))
    a.step(seek=[Seek(request_id="r", token_ids=list(range(200)), salt="")])
    a.step(finish=[Finish(request_id="r", first_token=None)])
    released: list[int] = []

    class Late:
        tokens = 64

        def release(self, used_tokens: int = 0) -> bool:
            released.append(used_tokens)
            return True

    loan: Loan = Late()  # type: ignore[assignment]
    told[0](loan)
    assert released == [0]
    assert a.found("r") is None
