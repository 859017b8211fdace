"""Text through a prefill/decode pair equals an ordinary replica's, at the lengths that break."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agreement import CHAT_RANKING, COMPLETIONS_RANKING, Agreement
from e2e.cluster import Cluster, text_of
from e2e.conftest import FAMILIES
from e2e.prompts import exact_prompt

pytestmark = pytest.mark.engine

LENGTHS = (51, 64, 65, 66, 128, 129, 130, 193, 700)
DEMO_LENGTHS = (51, 65, 193)
OUTPUT_TOKENS = 16
PAGE_TOKENS = 64
PATH = "MLX p0>d0 beside o0"


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Cluster, Path]]:
    model_dir = checkpoints[request.param]
    with Cluster(tmp_path_factory.mktemp(request.param), model_dir) as cluster:
        yield cluster, model_dir


@pytest.fixture(scope="module")
def demo_pair(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Path]]:
    with Cluster(tmp_path_factory.mktemp("demo"), demo_model) as cluster:
        yield cluster, demo_model


def check_handoff(cluster: Cluster, before: dict[str, int], prompt_tokens: int) -> None:
    """One handoff moved n - 1 tokens in whole pages, and nothing is left of it."""
    after = cluster.pair()
    pages = -(-(prompt_tokens - 1) // PAGE_TOKENS)
    assert after["handoffs_completed"] - before["handoffs_completed"] == 1
    assert after["handoffs_failed"] == before["handoffs_failed"]
    assert after["imported_tokens"] - before["imported_tokens"] == prompt_tokens - 1
    page_bytes = cluster.status()["page_bytes"]
    assert after["host_bytes"] - before["host_bytes"] == pages * page_bytes
    cluster.wait("nothing in flight", cluster.idle)


def check_completion(cluster: Cluster, model_dir: Path, tokens: int, agreement: Agreement) -> None:
    prompt = exact_prompt(model_dir, tokens, seed=1)
    body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS}
    ranked = {"max_tokens": OUTPUT_TOKENS, **COMPLETIONS_RANKING}
    alone = cluster.completion(prompt, "o0", **ranked).json()
    before = cluster.pair()
    answer = cluster.completion(prompt, "p0>d0", **ranked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-pdctl-path"] == "p0>d0"
    assert answer.json()["usage"]["prompt_tokens"] == tokens
    label = f"{model_dir.name}, completion of {tokens} tokens"
    agreement.check(PATH, label, alone, answer.json())
    check_handoff(cluster, before, tokens)
    before = cluster.pair()
    events = cluster.stream("/v1/completions", body, "p0>d0")
    assert text_of(events) == answer.json()["choices"][0]["text"]
    check_handoff(cluster, before, tokens)


def check_chat(cluster: Cluster, model_dir: Path, content: str, agreement: Agreement) -> None:
    ranked = {"max_tokens": OUTPUT_TOKENS, **CHAT_RANKING}
    alone = cluster.chat(content, "o0", **ranked).json()
    tokens = alone["usage"]["prompt_tokens"]
    before = cluster.pair()
    answer = cluster.chat(content, "p0>d0", **ranked)
    assert answer.status_code == 200, answer.text
    agreement.check(PATH, f"{model_dir.name}, chat of {tokens} tokens", alone, answer.json())
    check_handoff(cluster, before, tokens)
    before = cluster.pair()
    messages = [{"role": "user", "content": content}]
    events = cluster.stream(
        "/v1/chat/completions", {"messages": messages, "max_tokens": OUTPUT_TOKENS}, "p0>d0"
    )
    assert text_of(events) == (answer.json()["choices"][0]["message"]["content"] or "")
    check_handoff(cluster, before, tokens)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_completions_through_a_pair_equal_an_ordinary_replica(
    pair: tuple[Cluster, Path], tokens: int, agreement: Agreement
) -> None:
    """R25: also where n % 64 is 1, where prefill holds one page more than decode wants."""
    check_completion(*pair, tokens, agreement)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_chat_through_a_pair_equals_an_ordinary_replica(
    pair: tuple[Cluster, Path], tokens: int, agreement: Agreement
) -> None:
    """The template is rendered by each engine and must come out the same on both."""
    cluster, model_dir = pair
    check_chat(cluster, model_dir, exact_prompt(model_dir, tokens, seed=2), agreement)


@pytest.mark.parametrize("tokens", DEMO_LENGTHS)
def test_the_demo_model_answers_the_same_through_a_pair(
    demo_pair: tuple[Cluster, Path], tokens: int, agreement: Agreement
) -> None:
    """A real checkpoint, not only random ones."""
    cluster, model_dir = demo_pair
    check_completion(cluster, model_dir, tokens, agreement)
    check_chat(cluster, model_dir, exact_prompt(model_dir, tokens, seed=3), agreement)
