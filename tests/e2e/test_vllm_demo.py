"""A real checkpoint through vLLM and MLX: FP32 arithmetic, FP16 pages, as the topology states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agreement import CHAT_RANKING, Agreement
from e2e.mixed import Mixed
from engines.vllm_replicas import needs_vllm

pytestmark = [pytest.mark.engine, needs_vllm]

REPLICAS = ("vp", "vd", "mp", "md")
QUESTION = "Name the capital of France and one river that flows through it."
OUTPUT_TOKENS = 24


@pytest.fixture(scope="module")
def demo(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    folder = tmp_path_factory.mktemp("demo")
    with Mixed(
        folder, demo_model, " ".join(REPLICAS), model="smollm2", context_length=2048
    ) as cluster:
        yield cluster


def test_the_arithmetic_of_each_replica_is_shown(demo: Mixed) -> None:
    """`compute_dtype` is never silent: plan and status both say it."""
    shown = demo.pdctl("plan", demo.topology).stdout
    assert shown.count("float32") >= len(REPLICAS)
    found = {r["name"]: r["compute_dtype"] for r in demo.status()["replicas"]}
    assert found == dict.fromkeys(REPLICAS, "float32")


@pytest.mark.parametrize("path", ["vp>vd", "vp>md", "mp>vd"])
def test_a_chat_through_each_pair_equals_the_decode_engine_alone(
    demo: Mixed, path: str, agreement: Agreement
) -> None:
    """Where text parts, the gap of its log probabilities is in the run's report."""
    body = {"max_tokens": OUTPUT_TOKENS, "pdctl_cache": False, **CHAT_RANKING}
    own = demo.chat(QUESTION, path.partition(">")[2], cache_salt="alone", **body)
    handed = demo.chat(QUESTION, path, cache_salt=path, **body)
    assert (own.status_code, handed.status_code) == (200, 200), handed.text
    assert "Paris" in own.json()["choices"][0]["message"]["content"]
    agreement.check(f"SmolLM2 {path}", "chat", own.json(), handed.json())
    demo.wait("nothing in flight", demo.idle, 10)
