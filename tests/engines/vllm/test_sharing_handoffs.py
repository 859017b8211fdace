"""Prefill and decode replicas beside a page store: real handoffs, real pages, numpy for blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines.vllm.sides import BLOCK, GEOMETRY, Side
from handoff.store.stores import CONTRACT, WAIT_S, Host, Replica, clients, host

from pdctl.engines.interface import Leg
from pdctl.engines.vllm.steps import Begin, Export, Finish, News, Notice, Place, Seek
from pdctl.handoff.identity import Identity
from pdctl.handoff.receiver import Receiver
from pdctl.handoff.sender import Sender
from pdctl.handoff.store.interface import Loan
from pdctl.handoff.store.keys import PromptKeys
from pdctl.handoff.ticket import mint
from pdctl.topology.model import PAGE_TOKENS

KEY = bytes(32)
IDS = list(range(1000, 1200))
"""Three full pages and a partial tail."""
SOURCE = [3, 9, 4, 1, 7, 12, 2]
TARGET = [20, 5, 11, 6, 30, 14, 22]


class Pair:
    """p0, a client of its host's store; d0, of the same or on a host without one; and another
    client that fills it."""

    def __init__(self, stack: ExitStack, store: Host, *, decode_shares: bool) -> None:
        self.store, self._decode_looks = store, decode_shares
        p, d, self.other = stack.enter_context(clients(store.path, 3))
        common: dict[str, Any] = {"timeout_s": 20.0, "on_failed": lambda *failed: None}
        sender = Sender(
            *(Identity("p0", KEY, CONTRACT.digest), GEOMETRY),
            listen=("127.0.0.1", 0),
            budget_bytes=1 << 20,
            board=p.board,
            **common,
        )
        stack.callback(sender.close)
        receiver = Receiver(Identity("d0", KEY, CONTRACT.digest), GEOMETRY, board=d.board, **common)
        stack.callback(receiver.close)
        assigned = SimpleNamespace(contract=CONTRACT)
        self.p = Side("p0", 1, store=p.store, assigned=assigned, sender=sender)
        self.d = Side(
            *("d0", 2),
            store=d.store if decode_shares else None,
            assigned=assigned,
            receiver=receiver,
        )
        self.p.session.board, self.d.session.board = p.board, d.board
        for side in (self.p, self.d):
            stack.callback(side.half.close)
        self.p_client, self.d_client = p, d
        self._looked = threading.Event()
        self._watch(d)
        self.leg = Leg(
            room=5,
            ticket=mint(KEY, 5, "p0", "d0", CONTRACT.digest, time.time() + 60),
            prefill="p0",
            decode="d0",
            sender=f"127.0.0.1:{sender.start()}",
            timeout_s=20.0,
        )

    def _watch(self, client: Replica) -> None:
        borrow = client.store.borrow

        def watched(keys: Sequence[bytes], timeout_s: float) -> Loan:
            loan = borrow(keys, timeout_s)
            self._looked.set()
            return loan

        client.store.borrow = watched  # type: ignore[method-assign]

    def begin(self, salt: str = "") -> None:
        """Both legs, until prefill may look into the store."""
        begin = Begin(request_id="r", leg=self.leg, token_ids=IDS, salt=salt)
        self.p.step(begin=[begin])
        self.d.step(begin=[begin])
        self.p.until(lambda: self.p.told(News.RESERVED))
        self.d.until(lambda: self.d.told(News.OFFERED))

    def seek(self, salt: str = "") -> int:
        """How many of the prompt's positions prefill need not compute."""
        self.p.step(seek=[Seek(request_id="r", token_ids=IDS, salt=salt)])
        self.p.until(lambda: any(n.news is News.FOUND for n in self.p.notices))
        return next(n.tokens for n in self.p.notices if n.news is News.FOUND)

    def load(self, tokens: int) -> set[int]:
        """Prefill's blocks that were not filled."""
        private = SOURCE[: -(-tokens // BLOCK)]
        self.p.step(place=[Place(request_id="r", blocks=SOURCE, held_tokens=0, private=private)])
        self.p.until(lambda: self.p.loaded == {"r"})
        return self.p.lost

    def compute(self, *positions: int) -> None:
        for each in positions:
            self.p.step(export=[Export(request_id="r", blocks=SOURCE, positions=each)])
        self.p.step(finish=[Finish(request_id="r", first_token=3)])

    def place(self, held: int = 0) -> None:
        """Decode has blocks; returns once it has looked into its store, where it does: what
        prefill stores from then on comes too late."""
        private = TARGET[held // BLOCK :]
        self.d.step(place=[Place(request_id="r", blocks=TARGET, held_tokens=held, private=private)])

        if self._decode_looks and held + PAGE_TOKENS < len(IDS):
            assert self._looked.wait(WAIT_S)

    def committed(self) -> None:
        self.d.until(lambda: self.d.loaded == {"r"})
        assert self.d.lost == set()
        self.d.until(lambda: self.d_client.board.read().handoffs_active == 0)


def row(side: Side, blocks: list[int], start: int, stop: int) -> Any:
    cells = side.memory.cells
    return np.stack([cells[blocks[n // BLOCK], :, :, n % BLOCK] for n in range(start, stop)])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        store = stack.enter_context(host(tmp_path / "s.sock"))
        yield Pair(stack, store, decode_shares=True)
        assert store.returned()


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Pair]:
    """Decode is on a host that has no store."""
    with ExitStack() as stack:
        store = stack.enter_context(host(tmp_path / "s.sock"))
        yield Pair(stack, store, decode_shares=False)
        assert store.returned()


def stored(client: Replica) -> int:
    return client.board.read().stored_pages


def test_prefill_stores_what_it_computes_and_sends_all_of_it(pair: Pair) -> None:
    """Every position arrives bit by bit, and the store has the whole prompt, tail included."""
    pair.begin()
    assert pair.seek() == 0
    pair.place()
    pair.compute(100, 200)
    pair.committed()
    assert np.array_equal(row(pair.p, SOURCE, 0, 199), row(pair.d, TARGET, 0, 199))
    pair.p.until(lambda: stored(pair.p_client) == 4)
    tokens, pages = pair.other.take(IDS)
    assert tokens == 200
    assert np.array_equal(pages[0, :, :, 0], row(pair.p, SOURCE, 0, 1)[0])


def test_prefill_computes_only_what_the_store_lacks(apart: Pair) -> None:
    """The rest is loaded, and decode gets both parts; nothing is stored twice."""
    apart.other.give(IDS[:128])
    apart.begin()
    assert apart.seek() == 128
    assert apart.load(128) == set()
    apart.place()
    apart.compute(200)
    apart.committed()
    assert np.array_equal(row(apart.p, SOURCE, 0, 199), row(apart.d, TARGET, 0, 199))
    assert apart.d_client.board.read().imported_tokens == 199
    assert apart.p_client.board.read().reused_tokens == 128
    apart.p.until(lambda: stored(apart.p_client) == 2)


@pytest.mark.parametrize(("held", "reused"), [(0, 192), (96, 96), (160, 0)])
def test_decode_takes_full_pages_from_its_store_and_the_rest_travels(
    pair: Pair, held: int, reused: int
) -> None:
    """R25, R26: its own prefix stays byte-identical, less than a page is not looked for, and
    what is neither held nor stored is imported."""
    assert pair.other.give(IDS) == 4
    pair.begin()
    pair.seek()
    pair.load(199)
    before = row(pair.d, TARGET, 0, held) if held else None
    pair.place(held)
    pair.compute(200)
    pair.committed()
    assert np.array_equal(row(pair.p, SOURCE, held, 199), row(pair.d, TARGET, held, 199))
    assert before is None or np.array_equal(before, row(pair.d, TARGET, 0, held))
    told = pair.d_client.board.read()
    assert told.reused_tokens == reused
    assert told.imported_tokens == 199 - held - reused
    assert told.reused_pages == (held + reused) // 64


def test_a_handoff_of_one_tenant_finds_nothing_of_another(pair: Pair) -> None:
    """R48: neither end."""
    pair.other.give(IDS, salt="one")
    pair.begin(salt="two")
    assert pair.seek(salt="two") == 0
    pair.place()
    pair.compute(200)
    pair.committed()
    assert pair.d_client.board.read().imported_tokens == 199


def test_a_store_that_goes_away_under_decode_leaves_all_of_it_to_the_sender(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was copied is written over: the handoff is whole."""
    pair.other.give(IDS)
    pair.begin()
    pair.seek()
    pair.load(199)
    borrow = pair.d_client.store.borrow

    def lost(keys: Any, timeout_s: float) -> Any:
        loan = borrow(keys, timeout_s)
        wrong = [page + 1 for page in loan.pages]
        assert loan.release()
        return SimpleNamespace(tokens=loan.tokens, pages=wrong, release=lambda used=0: False)

    monkeypatch.setattr(pair.d_client.store, "borrow", lost)
    pair.place()
    pair.compute(200)
    pair.committed()
    assert np.array_equal(row(pair.p, SOURCE, 0, 199), row(pair.d, TARGET, 0, 199))
    assert pair.d_client.board.read().imported_tokens == 199


def test_a_store_that_dies_before_a_handoff_is_a_miss_for_both_ends(pair: Pair) -> None:
    pair.other.give(IDS)
    pair.store.server.close()
    pair.p_client.connect(wanted=False)
    pair.d_client.connect(wanted=False)
    pair.begin()
    assert pair.seek() == 0
    pair.place()
    pair.compute(200)
    pair.committed()
    assert pair.d_client.board.read().imported_tokens == 199


def test_a_store_that_dies_while_prefill_loads_fails_that_handoff(apart: Pair) -> None:
    """vLLM was promised positions that are not there: decode is told the cause, and its blocks
    are reported as not filled."""
    apart.other.give(IDS)
    apart.begin()
    assert apart.seek() == 199
    apart.place()
    apart.store.server.close()
    apart.p_client.connect(wanted=False)
    assert apart.load(199) == set(SOURCE)
    apart.p.step(finish=[Finish(request_id="r", first_token=None)])
    apart.d.until(lambda: apart.d.loaded == {"r"})
    assert apart.d.lost == set(TARGET)
    apart.p.until(lambda: Notice(request_id="r", news=News.FAILED) in apart.p.notices)


def test_a_decode_that_is_cancelled_while_it_copies_gives_its_loan_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R10: the copy comes to its end, then the blocks are reported; nothing stays on loan."""
    pair.other.give(IDS)
    pair.begin()
    pair.seek()
    prompt = pair.d_client.store.prompt

    def cancelled(ids: Any, salt: str) -> PromptKeys:
        pair.d.half._decode["r"].finish(aborted=True)
        return prompt(ids, salt)

    monkeypatch.setattr(pair.d_client.store, "prompt", cancelled)
    pair.place()
    pair.d.until(lambda: pair.d.loaded == {"r"})
    assert pair.d.lost == set(TARGET)
    pair.p.step(finish=[Finish(request_id="r", first_token=None)])
