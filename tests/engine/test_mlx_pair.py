"""MLX to MLX: two real server processes, text equal to one that serves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from agreement import Agreement, ranking
from e2e.prompts import exact_prompt
from engine.conftest import Trio, trio
from engine.vllm_pairs import check_at_rest
from engines.replicas import Pair, text_of
from tiny import FAMILIES, make_checkpoint

from pdctl.topology.model import PAGE_TOKENS, ComputeDtype

pytestmark = pytest.mark.engine

LENGTHS = (51, 64, 65, 66, 128, 129, 130, 193, 700)
OUTPUT_TOKENS = 16
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(
    scope="module",
    params=[(f, c) for f in FAMILIES for c in (ComputeDtype.FLOAT32, ComputeDtype.FLOAT16)],
    ids=lambda param: f"{param[0]}-{param[1].value}",
)
def started(request: pytest.FixtureRequest, folder: Path) -> Iterator[Trio]:
    family, compute = request.param
    model_dir = make_checkpoint(folder / family, family)
    with ExitStack() as stack:
        yield trio(stack, folder, model_dir, compute)


def body_of(trio: Trio, path: str, tokens: int) -> dict[str, Any]:
    common = {"max_tokens": OUTPUT_TOKENS, "temperature": 0}
    if path == COMPLETIONS:
        return {**common, "prompt": exact_prompt(trio.model_dir, tokens, seed=1)}
    content = exact_prompt(trio.model_dir, tokens, seed=2)
    return {**common, "messages": [{"role": "user", "content": content}]}


def imported(pair: Pair) -> int:
    return pair.decode.counters().imported_tokens


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_text_through_a_pair_equals_text_of_one(
    started: Trio, path: str, tokens: int, agreement: Agreement
) -> None:
    """R25: at every length around a page's end, streamed and not, n - 1 positions
    travel in whole pages and nothing of the handoff is left."""
    pair, body = started.pair, body_of(started, path, tokens)
    ranked = {**body, **ranking(path)}
    status, alone = started.alone.post(path, {**ranked, "pdctl_cache": False})
    assert status == 200, alone
    count = alone["usage"]["prompt_tokens"]
    before, bytes_before = imported(pair), pair.decode.counters().host_bytes

    (prefilled, answer), (decoded, whole) = pair.post(path, ranked)
    assert (prefilled, decoded) == (200, 200), (answer, whole)
    assert answer["usage"]["completion_tokens"] == 1
    compute = pair.decode.agent.assignment.compute_dtype.value
    label = f"{started.model_dir.name} in {compute}, {path}, {count} tokens"
    agreement.check("mlx>mlx", label, alone, whole)
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == count - 1
    assert imported(pair) - before == count - 1
    pages = -(-(count - 1) // PAGE_TOKENS)
    arrived = pair.decode.counters().host_bytes - bytes_before
    assert arrived == pages * started.contract.page_bytes

    events = pair.events(path, body)
    assert "".join(map(text_of, events)) == text_of(whole)
    check_at_rest(pair.prefill, pair.decode)


def test_every_phase_of_a_handoff_is_observed(
    started: Trio, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """What lies between prefill's last forward and decode's first is transfer and import."""
    for _ in range(5):
        started.pair.post(COMPLETIONS, body_of(started, COMPLETIONS, 51))
    sent, received = started.pair.prefill.counters(), started.pair.decode.counters()
    assert set(sent.phases) == {"queue", "prefill", "transfer"}
    assert set(received.phases) == {"import", "first_token"}
    for name, phase in {**sent.phases, **received.phases}.items():
        record_testsuite_property(f"51_tokens.{name}_ms", round(phase.last_s * 1e3, 2))
        assert phase.count >= 5
