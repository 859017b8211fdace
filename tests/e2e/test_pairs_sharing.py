"""Prefill and decode replicas beside ordinary ones, and the page store of their host, launched as a
user does: those of MLX with vLLM's, then with SGLang's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.crowd import Crowd, counted
from e2e.mixed import Mixed
from e2e.stores import (
    DOCUMENT_TOKENS,
    FULL_TOKENS,
    ask,
    check_killed_in_mid_traffic,
    clear_document,
    document,
    publish,
    sharing_of,
    store,
)
from e2e.test_soak import clear_answers
from engines.sglang_replicas import needs_sglang
from engines.vllm_replicas import needs_vllm
from tiny import digits

from pdctl.topology.model import PAGE_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PAGES = 120
LOAD_S = 8.0
STORE_WENT = "the page store went away"


class Pairs(Mixed):
    """Two prefill and two decode replicas, and two ordinary ones of MLX."""

    def __init__(self, folder: Path, model_dir: Path, engine: str) -> None:
        replicas = f"{engine}p {engine}d mp md mo mo1"
        super().__init__(
            *(folder, model_dir, replicas), context_length=2048, handoff=sharing_of(PAGES)
        )
        self.paths = [f"{p}p>{d}d" for p in (engine, "m") for d in (engine, "m")]


@pytest.fixture(
    scope="module",
    params=[pytest.param("v", marks=needs_vllm), pytest.param("s", marks=needs_sglang)],
    ids=["vllm", "sglang"],
)
def shared(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pairs]:
    folder = tmp_path_factory.mktemp("pairs")
    with Pairs(folder, checkpoints["llama"], request.param) as cluster:
        yield cluster


def counts(cluster: Pairs, path: str) -> list[int]:
    """Positions that each end has taken from the store, and that decode has imported, and its pages
    that did not travel."""
    names = path.split(">")
    pair = cluster.pair(*names)
    taken = [int(cluster.replica(name)["reused_tokens"]) for name in names]
    return [*taken, pair["imported_tokens"], pair["reused_pages"]]


def test_what_is_stored_is_neither_computed_nor_sent(shared: Pairs) -> None:
    """An ordinary replica computed the document: prefill computes what its engine must, decode
    takes the full pages and imports the rest; the text is MLX's alone."""
    for path in shared.paths:
        text, expected = clear_document(shared)
        publish(shared, text, "mo", DOCUMENT_TOKENS)
        before = counts(shared, path)
        answer, _ = ask(shared, text, path)
        assert answer.strip() == expected.strip(), path
        computed = FULL_TOKENS if path[0] == "s" else DOCUMENT_TOKENS - 1
        wanted = DOCUMENT_TOKENS if ">s" in path else DOCUMENT_TOKENS - 1
        gains = [computed, FULL_TOKENS, wanted - FULL_TOKENS, FULL_TOKENS // PAGE_TOKENS]
        after = [a + gain for a, gain in zip(before, gains, strict=True)]
        shared.wait(
            f"{path}: {after}", lambda path=path, after=after: counts(shared, path) == after
        )
        assert shared.pair(*path.split(">"))["handoffs_failed"] == 0


def test_what_prefill_computes_others_need_not(shared: Pairs) -> None:
    """All of it is stored, and an ordinary replica computes the last token alone; another
    tenant's request finds nothing."""
    for path in shared.paths:
        text, expected = clear_document(shared)
        prefill = path.partition(">")[0]
        stored = shared.replica(prefill)["stored_pages"] + -(-DOCUMENT_TOKENS // PAGE_TOKENS)
        assert ask(shared, text, path)[0].strip() == expected.strip(), path
        wait_for_pages(shared, prefill, stored)
        assert ask(shared, text, "mo1") == (expected, DOCUMENT_TOKENS - 1), path
        reused = shared.replica(prefill)["reused_tokens"]
        assert ask(shared, text, path, cache_salt="another")[0].strip() == expected.strip(), path
        assert shared.replica(prefill)["reused_tokens"] == reused


def wait_for_pages(cluster: Pairs, replica: str, stored: int) -> None:
    cluster.wait("its pages", lambda: cluster.replica(replica)["stored_pages"] >= stored)


def test_clients_that_leave_at_random_moments_take_nothing_with_them(
    shared: Pairs, checkpoints: dict[str, Path]
) -> None:
    """U1, U4, U7, U34: few prompts, so that most are stored; the others' answers are right, no
    handoff fails, nothing is in flight and no page on loan."""
    answers = clear_answers(shared, checkpoints["llama"], "mo")
    before, clients = (
        counted(shared, shared.paths),
        Crowd(shared, answers, shared.paths, leaving=0.5),
    )
    clients.run(LOAD_S)
    clients.check()
    shared.wait("nothing in flight", shared.idle, 15)
    after = counted(shared, shared.paths)
    for path in shared.paths:
        assert after[path]["handoffs_failed"] == before[path]["handoffs_failed"]
        assert after[path]["handoffs_completed"] > before[path]["handoffs_completed"]
    shared.wait("nothing on loan", lambda: store(shared)["loans"] == 0)


def test_the_store_is_killed_in_mid_traffic(shared: Pairs) -> None:
    """A handoff goes on without it, or is told so; the store is started again, and used again by
    both ends."""
    texts = [digits(300, 5000 + number % 4) for number in range(16)]
    check_killed_in_mid_traffic(shared, (*shared.paths, "mo"), texts, STORE_WENT)
    for path in shared.paths:
        shared.wait(f"pages for {path}", lambda path=path: both_take(shared, path))
    shared.wait("nothing in flight", shared.idle)
    shared.wait("nothing on loan", lambda: store(shared)["loans"] == 0)


def both_take(cluster: Pairs, path: str) -> bool:
    """Whether prefill and decode take what an ordinary replica has just computed."""
    text, before = document(), counts(cluster, path)
    ask(cluster, text, "mo")
    ask(cluster, text, path)
    gained = [b - a for a, b in zip(before, counts(cluster, path), strict=True)]
    return gained[0] >= PAGE_TOKENS and gained[1] >= PAGE_TOKENS
