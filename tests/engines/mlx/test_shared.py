"""Two MLX loops in this process and one page store: what one computed, the other takes over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

from engines.mlx.loops import WAIT_S, asked, provider_of, tokens_of, until
from engines.replicas import contract_of
from handoff.store.stores import Host
from tiny import digits, make_checkpoint

from pdctl.engines.mlx.admission import Admission, Asked
from pdctl.engines.mlx.call import Call
from pdctl.engines.mlx.loop import EngineLoop
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.store.client import StoreClient
from pdctl.handoff.store.interface import StoreSeat
from pdctl.topology.contract import Contract
from pdctl.topology.model import ComputeDtype, OnFailure, Role

pytestmark = pytest.mark.engine


class Ordinary:
    """An ordinary replica's loop, without HTTP."""

    def __init__(self, model_dir: Path, contract: Contract, socket: str) -> None:
        self.board = CounterBoard()
        self.before = self.board.read()
        self.died: list[BaseException] = []
        self.store = StoreClient(StoreSeat(socket=socket), contract=contract, board=self.board)
        self.loop = EngineLoop(
            provider_of(model_dir),
            contract=contract,
            compute=ComputeDtype.FLOAT32,
            board=self.board,
            died=self.died.append,
        )
        self.admission = Admission(
            self.loop,
            replica="o0",
            role=Role.BOTH,
            on_failure=OnFailure.ERROR,
            sender=None,
            receiver=None,
            store=self.store,
        )

    def ask(self, prompt: str, max_tokens: int = 6, **fields: Any) -> Call:
        request, arguments, _ = asked(prompt, max_tokens, None)
        return self.admission.admit(request, arguments, Asked(**fields))

    def answer(self, prompt: str, **fields: Any) -> tuple[list[int], int]:
        """(tokens, how many of the prompt were not computed)."""
        call = self.ask(prompt, **fields)
        return tokens_of(call), call.context.prompt_cache_count

    def count(self, name: str) -> int:
        """Since the test began."""
        found: int = getattr(self.board.read(), name) - getattr(self.before, name)
        return found

    def stored(self, pages: int) -> None:
        until(lambda: self.count("stored_pages") >= pages)

    def close(self) -> None:
        self.store.close()
        self.loop.stop_and_join()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def host(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made = Host(tmp_path_factory.mktemp("store") / "s.kv", contract=contract_of(model_dir))
    yield made
    made.close()


@pytest.fixture(scope="module")
def running(model_dir: Path, host: Host) -> Iterator[list[Ordinary]]:
    found = [Ordinary(model_dir, contract_of(model_dir), host.path) for _ in range(2)]
    for each in found:
        assert each.loop.loaded.wait(WAIT_S), each.died
    yield found
    for each in found:
        each.close()


@pytest.fixture
def pair(running: list[Ordinary]) -> Iterator[list[Ordinary]]:
    """Counting from here, with their store."""
    for each in running:
        assert each.store.settled(True, WAIT_S)
        each.before = each.board.read()
    yield running
    assert [each.died for each in running] == [[], []]


def prompt_of(test: int) -> str:
    """200 tokens, the first of which begins no other test's prompt."""
    return f"{test}{digits(199, seed=test)}"


def test_the_same_prompt_is_computed_once(pair: list[Ordinary]) -> None:
    """All but the last of its tokens come from the store, partial tail included, and the text
    is what the first replica said."""
    a, b = pair
    prompt = prompt_of(1)
    alone, cached = a.answer(prompt)
    assert cached == 0
    a.stored(4)
    text, cached = b.answer(prompt)
    assert cached == 199
    assert text == alone
    assert b.count("reused_tokens") == 199
    assert b.count("stored_pages") == 0


def test_another_question_takes_the_shared_pages(pair: list[Ordinary]) -> None:
    """A prompt that goes on otherwise takes every full page before that, and stores the rest."""
    a, b = pair
    document = prompt_of(2)
    a.answer(document)
    a.stored(4)
    other = document[:150] + digits(60)[::-1]
    text, cached = b.answer(other)
    assert cached == 128
    assert text == b.answer(other, keeps_prefix=False)[0]
    b.stored(2)


def test_its_own_prefix_comes_before_the_stores(pair: list[Ordinary]) -> None:
    """What a replica keeps itself is not copied from the store."""
    a, _ = pair
    prompt = prompt_of(3)
    a.answer(prompt)
    a.stored(4)
    assert a.answer(prompt)[1] == 199
    assert a.count("read_pages") == 0


def test_what_needs_no_copy_joins_the_batch_in_the_same_turn(
    pair: list[Ordinary], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop puts the call there itself: a turn with another's prompt in it may take seconds."""
    a, _ = pair
    prompt = f"a{digits(199, seed=10)}"
    a.answer(prompt)
    a.stored(4)
    threads, insert = [], a.loop.insert

    def inserted(call: Call) -> None:
        threads.append(threading.current_thread())
        insert(call)

    monkeypatch.setattr(a.loop, "insert", inserted)
    assert a.answer(prompt)[1] == 199
    assert threads == [a.loop._generation_thread]


def test_salted_prompts_are_of_their_tenant_alone(pair: list[Ordinary]) -> None:
    """R48: neither the store nor a replica's own prefixes cross from one salt to another."""
    a, b = pair
    prompt = prompt_of(4)
    a.answer(prompt, salt="x")
    a.stored(4)
    assert a.answer(prompt, salt="y")[1] == 0
    assert b.answer(prompt)[1] == 0
    assert b.answer(prompt, salt="x")[1] == 199


def test_a_request_that_keeps_nothing_neither_reads_nor_writes(pair: list[Ordinary]) -> None:
    """`pdctl_cache` false: the prompt is computed, and nobody gets it."""
    a, b = pair
    prompt = prompt_of(5)
    a.answer(prompt, keeps_prefix=False)
    assert b.answer(prompt)[1] == 0
    assert a.count("stored_pages") == 0


def test_a_store_that_ends_is_a_miss(pair: list[Ordinary], host: Host) -> None:
    """Requests go on while the store is away, and take from it again once it is back."""
    a, b = pair
    prompt = prompt_of(6)
    alone, _ = a.answer(prompt)
    a.stored(4)
    host.server.close()
    assert b.answer(prompt) == (alone, 0)
    assert b.store.settled(False, WAIT_S)
    host.serve()
    assert a.store.settled(True, WAIT_S)
    assert b.store.settled(True, WAIT_S)
    a.answer(prompt_of(9))
    a.stored(8)
    assert b.answer(prompt_of(9))[1] == 199


def test_a_publication_that_fails_harms_no_answer(
    pair: list[Ordinary], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R35: the answer is delivered whole, and the replica serves the next one."""
    a, _ = pair

    def broken(*arguments: Any, **named: Any) -> bool:
        raise RuntimeError("a broken store")

    prompt = prompt_of(7)
    expected, _ = a.answer(prompt, keeps_prefix=False)
    monkeypatch.setattr(a.store, "publish_soon", broken)
    assert a.answer(prompt)[0] == expected
    assert a.answer(prompt)[0] == expected


def test_a_client_that_leaves_frees_what_it_took(pair: list[Ordinary], host: Host) -> None:
    """A call that ends in the middle of its answer gives back its memory and its loan."""
    a, b = pair
    prompt = prompt_of(8)
    a.answer(prompt)
    a.stored(4)
    call = b.ask(prompt, max_tokens=400)
    call.first()
    b.admission.cancel(call)
    until(lambda: b.board.read().requests_active == 0)
    until(lambda: host.shelves.counts().loans == 0)


def test_a_prompt_within_one_page_is_not_shared(pair: list[Ordinary]) -> None:
    """It would take a page of the store to save less than one."""
    a, b = pair
    a.answer(prompt_of(0)[:64])
    assert b.answer(prompt_of(0)[:64])[1] == 0
    assert a.count("stored_pages") == 0
