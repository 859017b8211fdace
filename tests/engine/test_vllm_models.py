"""Each other family through vLLM into MLX."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from agreement import Agreement, ranking
from engine.vllm_pairs import CHAT, COMPLETIONS, answered_alone, chat, check_at_rest, completion
from engines.replicas import Pair, Process, contract_of
from engines.vllm_replicas import VllmProcess, needs_vllm
from tiny import make_checkpoint

from pdctl.topology.model import Role

pytestmark = [pytest.mark.engine, needs_vllm]

FAMILIES = ("qwen2", "qwen3")


@pytest.fixture(scope="module")
def pairs(folder: Path) -> Iterator[dict[str, Pair]]:
    """All start at once."""
    with ExitStack() as stack:
        found = {}
        for family in FAMILIES:
            model = make_checkpoint(folder / family, family)
            contract = contract_of(model)
            prefill = VllmProcess(folder, f"vp-{family}", Role.PREFILL, model, contract)
            decode = Process(folder, f"md-{family}", Role.DECODE, model, contract)
            found[family] = Pair(stack.enter_context(prefill), stack.enter_context(decode))
        for pair in found.values():
            pair.prefill.await_ready()
        yield found


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("tokens", [65, 193])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_through_vllm_into_mlx(
    pairs: dict[str, Pair], family: str, tokens: int, path: str, agreement: Agreement
) -> None:
    """Biases of Qwen2's projections and Qwen3's norms of queries and keys are in the pages."""
    pair, make = pairs[family], chat if path == CHAT else completion
    body = {**make(tokens, 30, salt=family), **ranking(path)}
    own = answered_alone(pair.decode, path, body)
    (prefilled, answer), (decoded, whole) = pair.post(path, body)
    assert (prefilled, decoded) == (200, 200), (answer, whole)
    agreement.check("vllm>mlx", f"{family}, {path}, {tokens} tokens", own, whole)
    check_at_rest(pair.prefill, pair.decode)
