"""Prefix KV shared between ordinary replicas of one engine and of different ones: real processes
and one page store."""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from agreement import COMPLETIONS_RANKING, NEAR_TIE_NATS, Agreement, steps_of
from engine.shared import (
    DOCUMENT_TOKENS,
    Answer,
    Store,
    ask,
    document,
    question,
    reusable,
)
from engine.vllm_pairs import COMPLETIONS, check_at_rest, until
from engines.replicas import Process, contract_of
from engines.sglang_replicas import SglangProcess, needs_sglang
from engines.vllm_replicas import VllmProcess, needs_vllm

from pdctl.topology.model import PAGE_TOKENS, Role

pytestmark = [pytest.mark.engine, needs_vllm, needs_sglang]

CHUNK_TOKENS = 128
ASKED, ASKED_ELSE = "1234567", "76543210"
WAYS = ("v0>v1", "v1>v0", "s0>s1", "v0>s0", "s0>v0", "v0>m0", "m0>v0", "s0>m0", "m0>s0")
"""From the replica that computes a document to the one that need not."""
CLIENTS, REQUESTS = 4, 104
CLEAR_NATS = 3 * NEAR_TIE_NATS

seeds = itertools.count(1000)
"""Of documents, each of which is new to the store and to every replica."""


class Fleet:
    def __init__(self, store: Store, replicas: dict[str, Process]) -> None:
        self.store = store
        self.replicas = replicas

    def of(self, way: str) -> tuple[Process, Process]:
        giver, taker = way.split(">")
        return self.replicas[giver], self.replicas[taker]

    def give(self, process: Process, *texts: str, **fields: Any) -> list[Answer]:
        """It computes them, and the store has them."""
        held = process.counters().stored_pages
        answers = [ask(process, question(text, **fields)) for text in texts]
        assert all(answer.is_cold for answer in answers)
        pages = sum(-(-answer.prompt_tokens // PAGE_TOKENS) for answer in answers)
        until(process, lambda counters: counters.stored_pages >= held + pages)
        self.store.at_rest()
        return answers

    def rejoined(self, process: Process) -> None:
        """The store gets what it computes again."""
        held = process.counters().stored_pages
        while process.counters().stored_pages == held:
            ask(process, question(document(next(seeds), 2 * PAGE_TOKENS), max_tokens=1))

    def clear(self, tokens: int) -> Iterator[str]:
        """Documents whose answer has no near-tie: every engine, with pages of 16 bits, gives the
        same."""
        while True:
            text = document(next(seeds), tokens)
            answer = self.own(self.replicas["v1"], text).whole
            ranked = (sorted(step.likeliest.values()) for step in steps_of(answer))
            if min(best - second for *_, second, best in ranked) > CLEAR_NATS:
                yield text

    def own(self, process: Process, document: str, asked: str = "") -> Answer:
        """What it computes by itself: nobody else has that salt."""
        body = question(document, asked, cache_salt=f"own {next(seeds)}", **COMPLETIONS_RANKING)
        answer = ask(process, body)
        assert answer.is_cold
        return answer


@pytest.fixture(scope="module")
def fleet(folder: Path, llama_dir: Path) -> Iterator[Fleet]:
    """Two of vLLM, whose blocks differ, two of SGLang and one of MLX."""
    contract = contract_of(llama_dir)
    with ExitStack() as stack:
        store = Store(folder / "store.sock", contract)
        stack.callback(store.close)

        def of(kind: type[Process], name: str, **options: object) -> Process:
            made = kind(
                *(folder, name, Role.BOTH, llama_dir, contract), store=store.path, **options
            )
            return stack.enter_context(made)

        launched = [
            of(VllmProcess, "v0", max_num_batched_tokens=CHUNK_TOKENS),
            of(VllmProcess, "v1", block_size=128),
            of(SglangProcess, "s0", chunked_prefill_size=CHUNK_TOKENS),
            of(SglangProcess, "s1"),
            of(Process, "m0"),
        ]
        for process in launched:
            process.await_ready()
        yield Fleet(store, {process.name: process for process in launched})


@pytest.mark.parametrize("way", WAYS)
def test_a_document_is_computed_once(
    fleet: Fleet, way: str, agreement: Agreement, capsys: pytest.CaptureFixture[str]
) -> None:
    """U16, R45: of the same prompt all but the last token is reused, or all its full pages where
    the engine has no others; of another question about it, every full page that both share. The
    text is that of an engine alone."""
    giver, taker = fleet.of(way)
    text, other, timed = (document(next(seeds)) for _ in range(3))
    fleet.give(giver, text, other + ASKED, timed)
    warm = ask(taker, question(text, **COMPLETIONS_RANKING))
    assert warm.cached_tokens == reusable(taker, DOCUMENT_TOKENS, DOCUMENT_TOKENS)
    own = fleet.own(taker, text)
    agreement.check(way, f"{warm.prompt_tokens} tokens", own.whole, warm.whole)
    asked = ask(taker, question(other, ASKED_ELSE, **COMPLETIONS_RANKING))
    assert asked.cached_tokens == DOCUMENT_TOKENS // PAGE_TOKENS * PAGE_TOKENS
    own = fleet.own(taker, other, ASKED_ELSE)
    agreement.check(way, "another question", own.whole, asked.whole)
    cold_s, warm_s = (
        ask(taker, question(timed, max_tokens=1, **salt)).seconds
        for salt in ({"cache_salt": f"cold {next(seeds)}"}, {})
    )
    with capsys.disabled():
        sys.stdout.write(
            f"\n{way}: {warm.cached_tokens} of {DOCUMENT_TOKENS} tokens reused; first token "
            f"{cold_s:.3f} s cold, {warm_s:.3f} s warm "
        )


@pytest.mark.parametrize("way", ["v0>v1", "s0>s1", "v1>s1", "s1>v0"])
def test_salted_documents_are_isolated(fleet: Fleet, way: str) -> None:
    """R48: another tenant finds nothing; the same one does, whatever the engine."""
    giver, taker = fleet.of(way)
    text = document(next(seeds))
    fleet.give(giver, text, cache_salt="one")
    assert ask(taker, question(text, cache_salt="two")).is_cold
    assert ask(taker, question(text)).is_cold
    same = ask(taker, question(text, cache_salt="one"))
    assert same.cached_tokens == reusable(taker, DOCUMENT_TOKENS, DOCUMENT_TOKENS)


def test_clients_that_leave_hold_nothing(fleet: Fleet) -> None:
    """U7, U34: at any stage, pages, blocks and locks come back; the next answer is right."""
    text = next(fleet.clear(DOCUMENT_TOKENS))
    (right,) = fleet.give(fleet.replicas["v0"], text)
    for name, process in fleet.replicas.items():
        for tries in range(8):
            salt = {"cache_salt": f"left {tries}"} if tries % 2 else {}
            process.send(COMPLETIONS, question(text, str(tries), stream=True, **salt)).close()
        assert ask(process, question(text)).text == right.text, name
    fleet.store.at_rest()
    check_at_rest(*fleet.replicas.values())


def test_answers_stay_right_through_many_requests(fleet: Fleet) -> None:
    """U17, R43: four clients, more documents than the store can hold, every replica."""
    texts = [next(fleet.clear(130 + 60 * n)) for n in range(10)]
    right = {text: ask(fleet.replicas["v1"], question(text, cache_salt="r")).text for text in texts}
    names = itertools.cycle(fleet.replicas)
    draw = random.Random(0)
    work = [(next(names), draw.choice(texts)) for _ in range(REQUESTS)]

    def wrong(job: tuple[str, str]) -> str | None:
        name, text = job
        answer = ask(fleet.replicas[name], question(text, cache_salt="many"))
        return None if answer.text == right[text] else f"{name}: {len(text)} tokens"

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert [found for found in pool.map(wrong, work) if found] == []
    fleet.store.at_rest()
    assert fleet.store.shelves.counts().evicted_pages > 0


def test_requests_go_on_while_the_store_is_away(fleet: Fleet) -> None:
    """A store that dies in mid-traffic is a miss, never an error; it comes back, and is used."""
    texts = [document(next(seeds)) for _ in range(4)]
    over = threading.Event()

    def traffic(name: str) -> int:
        for answered, text in enumerate(itertools.cycle(texts), 1):
            ask(fleet.replicas[name], question(text, str(answered)))
            if over.is_set():
                return answered
        raise AssertionError

    with ThreadPoolExecutor(len(fleet.replicas)) as pool:
        running = [pool.submit(traffic, name) for name in fleet.replicas]
        try:
            fleet.store.close()
            for name, process in fleet.replicas.items():
                assert ask(process, question(document(next(seeds)))).is_cold, name
            fleet.store.open()
            for process in fleet.replicas.values():
                fleet.rejoined(process)
        finally:
            over.set()
        assert all(each.result() for each in running)
    fleet.store.at_rest()
    for way in ("v0>v1", "s0>s1", "m0>v0"):
        giver, taker = fleet.of(way)
        text = document(next(seeds))
        fleet.give(giver, text)
        assert not ask(taker, question(text)).is_cold
