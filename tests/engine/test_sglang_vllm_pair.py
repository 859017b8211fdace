"""SGLang to vLLM and vLLM to SGLang over TCP, each to itself over NIXL: real processes, text equal
to one that serves alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from agreement import Agreement
from engine.sglang_pairs import CHUNK_TOKENS, Fleet, check_one_contract, check_text, over_nixl
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

        def start(
            kind: type[VllmProcess], name: str, role: Role, nixl: str, **options: object
        ) -> VllmProcess:
            made = kind(folder, name, role, llama_dir, contract, **options)
            return stack.enter_context(over_nixl(made, nixl))

        vllm = {"block_size": 128, "max_num_batched_tokens": CHUNK_TOKENS}
        sglang = {"chunked_prefill_size": CHUNK_TOKENS}
        vp = start(VllmProcess, "vp1", Role.PREFILL, "vd1", **vllm)
        vd = start(VllmProcess, "vd1", Role.DECODE, "vp1")
        sp = start(SglangProcess, "sp1", Role.PREFILL, "sd1", **sglang)
        sd = start(SglangProcess, "sd1", Role.DECODE, "sp1")
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


@pytest.mark.parametrize("tokens", [65, 700])
@pytest.mark.parametrize("name", ["vllm>vllm", "sglang>sglang"])
def test_text_over_nixl_equals_text_of_one(
    fleet: Fleet, name: str, tokens: int, agreement: Agreement
) -> None:
    """R25: the same replicas hand over by both ways, each with another peer."""
    check_text(fleet, name, tokens, COMPLETIONS, agreement)
    for end in (fleet.pair(name).prefill, fleet.pair(name).decode):
        assert end.agent.ready.terms["transports"] == ["tcp", "nixl"]


def test_one_checkpoint_is_one_contract(fleet: Fleet) -> None:
    """R56: in every role, SGLang and vLLM have loaded the same."""
    check_one_contract(fleet)
