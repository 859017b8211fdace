"""SGLang's real scheduler and forward around the copies of a GPU, which Triton's interpreter makes.

    make test-sglang-steps

What only a GPU shows (streams, page-locked memory, speed) it can't tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from agreement import Agreement
from engine import held, witness
from engine.held import MlxWitness
from engine.sglang_pairs import (
    CHUNK_TOKENS,
    Fleet,
    check_held_prefix_is_sent,
    check_many_at_once,
    check_next_is_right,
    check_text,
)
from engine.vllm_pairs import CHAT, COMPLETIONS
from engines.replicas import contract_of
from engines.sglang_replicas import SglangProcess, needs_sglang

from pdctl.topology.model import Role

pytestmark = [pytest.mark.engine, pytest.mark.slow, needs_sglang]

PAIRS = ("sglang>sglang", "sglang>mlx", "mlx>sglang")


@pytest.fixture(scope="module")
def fleet(folder: Path, llama_dir: Path) -> Iterator[Fleet]:
    """As in `test_sglang_pair.py`; SGLang's two ends copy as on a GPU."""
    contract, env = contract_of(llama_dir), witness.environment(folder)
    with ExitStack() as stack:

        def sglang(name: str, role: Role, more: dict[str, str], **options: object) -> SglangProcess:
            given = {"env": {**env, **more}, **options}
            made = SglangProcess(folder, name, role, llama_dir, contract, **given)
            return stack.enter_context(made)

        as_on_gpu = {"PDCTL_TEST_INTERPRETED": "1"}
        so = sglang("so0", Role.BOTH, {})
        sp = sglang("sp0", Role.PREFILL, as_on_gpu, chunked_prefill_size=CHUNK_TOKENS)
        sd = sglang("sd0", Role.DECODE, as_on_gpu, disaggregation_decode_enable_radix_cache=True)
        mp, md = (
            stack.enter_context(MlxWitness(folder, name, role, llama_dir, contract, env=env))
            for name, role in (("mp0", Role.PREFILL), ("md0", Role.DECODE))
        )
        for process in (so, sp, sd):
            process.await_ready()
        yield Fleet(so, {"sglang": (sp, sd), "mlx": (mp, md)})


@pytest.mark.parametrize("tokens", [51, 64, 65, 129, 300])
@pytest.mark.parametrize("name", PAIRS)
def test_text_through_a_pair_equals_text_of_one(
    fleet: Fleet, name: str, tokens: int, agreement: Agreement
) -> None:
    """R25, R31, U8: all layers leave within the steps of their chunks."""
    for path in (COMPLETIONS, CHAT):
        check_text(fleet, name, tokens, path, agreement)


@pytest.mark.parametrize("tokens", held.LENGTHS)
@pytest.mark.parametrize("name", PAIRS)
def test_decode_holds_prefills_numbers_rounded_once(
    folder: Path, llama_dir: Path, fleet: Fleet, name: str, tokens: int
) -> None:
    """R56: every layer of every position, in the order of the prompt."""
    held.check_rounded_once(folder, llama_dir, fleet.pair(name), name, tokens)


@pytest.mark.parametrize("name", ["sglang>sglang", "sglang>mlx"])
def test_what_prefill_holds_already_leaves_with_the_first_step(fleet: Fleet, name: str) -> None:
    """From the slots that its table names, though they are not computed again."""
    check_held_prefix_is_sent(fleet, name)


def test_prompts_of_one_step_leave_it_together(fleet: Fleet) -> None:
    """Each from its own row, into its own pages."""
    check_many_at_once(fleet, "sglang>sglang", 8)
    check_next_is_right(fleet.pair("sglang>sglang"), fleet)


def test_every_layer_left_within_its_step(fleet: Fleet) -> None:
    """The attention backend named each; the log would tell."""
    pair = fleet.pair("sglang>sglang")
    for process in (pair.prefill, pair.decode):
        assert "copied as on a GPU" in process.log
    assert "they leave after the forward" not in pair.prefill.log
