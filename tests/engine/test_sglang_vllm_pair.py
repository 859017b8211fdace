"""SGLang to vLLM and vLLM to SGLang: real processes, text equal to one that serves alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from agreement import Agreement
from engine.sglang_pairs import CHUNK_TOKENS, Fleet, check_one_contract, check_text
from engine.vllm_pairs import CHAT, COMPLETIONS, LENGTHS
from engines.replicas import contract_of
from engines.sglang_replicas import SglangProcess, needs_sglang
from engines.vllm_replicas import VllmProcess, needs_vllm

from pdctl.topology.model import Role

pytestmark = [pytest.mark.engine, needs_sglang, needs_vllm]


@pytest.fixture(scope="module")
def fleet(folder: Path, llama_dir: Path) -> Iterator[Fleet]:
    """Both compute prompts in chunks of 128 tokens; vLLM's decode computes alone too."""
    contract = contract_of(llama_dir)
    with ExitStack() as stack:

        def sglang(name: str, role: Role, **options: object) -> SglangProcess:
            made = SglangProcess(folder, name, role, llama_dir, contract, **options)
            return stack.enter_context(made)

        def vllm(name: str, role: Role, **options: object) -> VllmProcess:
            made = VllmProcess(folder, name, role, llama_dir, contract, **options)
            return stack.enter_context(made)

        vp = vllm("vp1", Role.PREFILL, block_size=128, max_num_batched_tokens=CHUNK_TOKENS)
        vd = vllm("vd1", Role.DECODE)
        sp = sglang("sp1", Role.PREFILL, chunked_prefill_size=CHUNK_TOKENS)
        sd = sglang("sd1", Role.DECODE)
        for process in (sp, sd, vp, vd):
            process.await_ready()
        yield Fleet(vd, {"sglang": (sp, sd), "vllm": (vp, vd)})


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", ["sglang>vllm", "vllm>sglang"])
def test_text_through_a_pair_equals_text_of_one(
    fleet: Fleet, name: str, tokens: int, path: str, agreement: Agreement
) -> None:
    """R25, R31, U13: as with any other pair."""
    check_text(fleet, name, tokens, path, agreement)


def test_one_checkpoint_is_one_contract(fleet: Fleet) -> None:
    """R56: in every role, SGLang and vLLM have loaded the same."""
    check_one_contract(fleet)
