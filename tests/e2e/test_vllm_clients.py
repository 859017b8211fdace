"""Load generators that know nothing of pdctl run through, and count what the router counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.clients import GUIDELLM, Load, Told, guidellm, vllm_bench_serve
from e2e.mixed import Mixed
from e2e.prompts import exact_prompt
from engines.vllm_replicas import needs_vllm

pytestmark = [pytest.mark.engine, needs_vllm]

PATHS = ("mp>vd", "vp>vd")
"""One decode replica, which holds what it was given: each has prompts of its own."""
TOKENS, REQUESTS = 70, 5
OUTPUT_TOKENS = 6
COUNTED = ("handoffs_completed", "handoffs_failed", "imported_tokens")
needs_guidellm = pytest.mark.skipif(
    not GUIDELLM.exists(), reason=f"no guidellm at {GUIDELLM} (make venv-guidellm)"
)


@needs_guidellm
@pytest.mark.parametrize(("client", "path"), [(vllm_bench_serve, PATHS[0]), (guidellm, PATHS[1])])
def test_a_load_generator_runs_through_a_pair_unmodified(
    mixed: Mixed, tmp_path: Path, client: Callable[..., Told], path: str
) -> None:
    """Every request is whole, and went through a handoff of exactly its tokens but the last."""
    before = mixed.pair(*path.split(">"))
    first = REQUESTS * PATHS.index(path)
    seeds = range(first, first + REQUESTS)
    texts = tuple(exact_prompt(mixed.model_dir, TOKENS, seed=seed) for seed in seeds)
    load = Load(texts, OUTPUT_TOKENS)
    told = client(mixed.url, mixed.model, mixed.model_dir, load, path, into=tmp_path)
    assert (told.completed, told.failed) == (REQUESTS, 0)
    assert told.input_tokens == REQUESTS * TOKENS
    assert told.output_tokens == REQUESTS * OUTPUT_TOKENS
    assert len(told.ttft_ms) == len(told.tpot_ms) == REQUESTS
    assert min(told.ttft_ms) > 0
    mixed.wait("nothing in flight", mixed.idle, 10)
    after = mixed.pair(*path.split(">"))
    moved = {name: after[name] - before[name] for name in COUNTED}
    assert moved == dict(zip(COUNTED, (REQUESTS, 0, REQUESTS * (TOKENS - 1)), strict=True))
