"""Ordinary replicas of vLLM, SGLang and MLX in one cluster that share prefix KV, launched as a
user does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.mixed import Mixed
from e2e.stores import (
    DOCUMENT_TOKENS,
    FULL_TOKENS,
    ask,
    cached_tokens,
    check_budget,
    check_killed_in_mid_traffic,
    clear_document,
    document,
    publish,
    sharing_of,
    store,
    takes,
)
from engines.sglang_replicas import needs_sglang
from engines.vllm_replicas import needs_vllm
from tiny import digits

from pdctl.topology.model import PAGE_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.slow, needs_sglang, needs_vllm]

REPLICAS = ("vo", "so", "mo")
PAGES = 40
"""Three documents, and not four."""
ASKED, ASKED_ELSE = "1234567", {"vo": "7654321", "so": "8765432", "mo": "9876543"}
"""Of one document."""
DOCUMENTS = 8


@pytest.fixture(scope="module")
def shared(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mixed]:
    options = {"context_length": 2048, "handoff": sharing_of(PAGES)}
    made = Mixed(
        *(tmp_path_factory.mktemp("engines"), checkpoints["llama"], " ".join(REPLICAS)), **options
    )
    text = made.topology.read_text()
    made.topology.write_text(text.replace("[router]\n", '[router]\npolicy = "prefix"\n'))
    with made as cluster:
        yield cluster


def reusable(replica: str, held: int, tokens: int) -> int:
    """Of a prompt of which the store has `held` positions: how many need not be computed."""
    most = min(held, tokens - 1)
    return most // PAGE_TOKENS * PAGE_TOKENS if replica[0] == "s" else most


def told(cluster: Mixed, replica: str) -> int:
    """Positions that it has taken from the store, as `pdctl ps` says."""
    found = next(one for one in cluster.ps()["replicas"] if one["name"] == replica)
    return int(found["reused_tokens"])


@pytest.mark.parametrize("giver", REPLICAS)
def test_a_document_asked_of_one_engine_is_reused_by_the_others(shared: Mixed, giver: str) -> None:
    """S1, S3, S6, R45: as many tokens as each engine can take, of the same prompt and of another
    question; the text is what MLX makes of it alone; `/status` and `ps` count what was taken."""
    text, expected = clear_document(shared)
    other = document()
    publish(shared, other + ASKED, giver, DOCUMENT_TOKENS + len(ASKED))
    assert publish(shared, text, giver, DOCUMENT_TOKENS).strip() == expected.strip()
    for taker in set(REPLICAS) - {giver}:
        before = shared.replica(taker)
        answer, cached = ask(shared, text, taker)
        assert answer.strip() == expected.strip(), taker
        assert cached == reusable(taker, DOCUMENT_TOKENS, DOCUMENT_TOKENS), taker
        assert ask(shared, other + ASKED_ELSE[taker], taker)[1] == FULL_TOKENS, taker
        after = shared.replica(taker)
        assert after["reused_tokens"] - before["reused_tokens"] == cached + FULL_TOKENS
        assert after["read_pages"] - before["read_pages"] == (cached + 63 + FULL_TOKENS) // 64
        shared.wait(
            f"{taker} in ps",
            lambda taker=taker, after=after: told(shared, taker) == after["reused_tokens"],
        )


def test_the_router_sends_a_question_where_its_document_is(shared: Mixed) -> None:
    """`policy = "prefix"`, no path pinned: the second question goes to the engine that had the
    first, and finds all its full pages there."""
    for giver in REPLICAS:
        text = document()
        publish(shared, text, giver, DOCUMENT_TOKENS)
        body = {"model": "tiny", "prompt": text + ASKED, "max_tokens": 2}
        answer = shared.http.post("/v1/completions", json=body)
        assert answer.headers["x-pdctl-path"] == giver
        assert cached_tokens(answer) >= FULL_TOKENS


def test_more_documents_than_fit(shared: Mixed) -> None:
    """R43: the store keeps to its budget, whoever fills it, and no replica grows with the number
    of documents."""
    replicas = itertools.cycle(REPLICAS)
    for _ in range(DOCUMENTS):
        ask(shared, document(), next(replicas))
    check_budget(shared, PAGES)
    warm = shared.footprint()
    for _ in range(3 * DOCUMENTS):
        ask(shared, document(), next(replicas))
    check_budget(shared, PAGES)
    for name, (mib, descriptors) in shared.footprint().items():
        assert mib <= warm[name][0] * 1.1 + 64, (name, warm)
        assert descriptors <= warm[name][1] + 8, (name, warm)


def test_the_store_is_killed_in_mid_traffic(shared: Mixed) -> None:
    """Requests of all three go on as misses; the store is started again, and used again by each
    of them."""
    texts = [digits(200, seed) for seed in range(12)]
    check_killed_in_mid_traffic(shared, REPLICAS, texts)
    for giver, taker in (("vo", "so"), ("so", "mo"), ("mo", "vo")):
        shared.wait(
            f"pages of {giver} for {taker}",
            lambda giver=giver, taker=taker: takes(shared, document(), giver, taker),
        )
    shared.wait("nothing on loan", lambda: store(shared)["loans"] == 0)
    shared.wait("nothing in flight", shared.idle)
