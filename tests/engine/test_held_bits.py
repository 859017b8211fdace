"""What a decode engine holds after a handoff is, bit for bit, what the prefill engine computed.

Both engines' own memory is read, each from inside its process (`witness.py`), and the pages
between them by a receiver of the test's own. Nothing of pdctl's conversions is used to read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from e2e.prompts import exact_prompt
from engine import witness
from engine.held import (
    LENGTHS,
    MlxWitness,
    check_rounded_once,
    handed_over,
    ids_of,
)
from engine.memory import same_bits, tokens_of
from engine.vllm_pairs import COMPLETIONS, Four, completion
from engines.own_ends import given
from engines.replicas import Pair, contract_of
from engines.vllm_replicas import VllmProcess, needs_vllm

from pdctl.handoff.page import PageGeometry
from pdctl.topology.contract import Contract
from pdctl.topology.model import ComputeDtype, Role

pytestmark = pytest.mark.engine

PAIRS = ("vllm>vllm", "vllm>mlx", "mlx>vllm", "mlx>mlx")
BLOCK_TOKENS = 64


@pytest.fixture(scope="module")
def contract(llama_dir: Path) -> Contract:
    return contract_of(llama_dir)


@pytest.fixture(scope="module")
def four(folder: Path, llama_dir: Path, contract: Contract) -> Iterator[Four]:
    """All in float32, with float16 pages; vLLM computes prompts in chunks of 256 tokens, in one
    process with its scheduler."""
    env = witness.environment(folder)
    with ExitStack() as stack:
        vp, vd = (
            stack.enter_context(
                VllmProcess(
                    *(folder, name, role, llama_dir, contract),
                    env={**env, "PDCTL_TEST_ONE_PROCESS": "1", "OMP_NUM_THREADS": "1"},
                    block_size=BLOCK_TOKENS,
                    max_num_batched_tokens=256,
                )
            )
            for name, role in (("vp2", Role.PREFILL), ("vd2", Role.DECODE))
        )
        mp, md = (
            stack.enter_context(MlxWitness(folder, name, role, llama_dir, contract, env=env))
            for name, role in (("mp2", Role.PREFILL), ("md2", Role.DECODE))
        )
        vp.await_ready()
        vd.await_ready()
        yield Four(vp, vd, mp, md)


@needs_vllm
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", PAIRS)
def test_decode_holds_prefills_numbers_rounded_once(
    folder: Path, llama_dir: Path, four: Four, name: str, tokens: int
) -> None:
    """R25: positions 0 to n-2."""
    check_rounded_once(folder, llama_dir, four.pair(name), name, tokens)


@needs_vllm
def test_vllms_blocks_are_copied_as_they_are(folder: Path, llama_dir: Path, four: Four) -> None:
    """Two whole blocks as memory, however it is laid out: decode's are prefill's, rounded."""
    pair = four.pair("vllm>vllm")
    tokens = 2 * BLOCK_TOKENS + 1
    leg = pair.leg()
    prompt = exact_prompt(llama_dir, tokens, seed=32)
    with witness.watched(folder):
        pair.post(COMPLETIONS, completion(tokens, salt="raw", prompt=prompt), leg)
    computed, imported = (
        witness.read(folder, leg.room, each.name)[:, :2] for each in (pair.prefill, pair.decode)
    )
    assert np.count_nonzero(computed) > 0.99 * computed.size
    assert same_bits(imported, computed.astype(np.float16).astype(np.float32))


@needs_vllm
@pytest.mark.parametrize("name", ["vllm", "mlx"])
def test_every_finite_float16_arrives_as_itself(
    folder: Path, llama_dir: Path, contract: Contract, four: Four, name: str
) -> None:
    """Also subnormal numbers and the zero with a sign, wherever a page has room for them: one
    page of the tiny checkpoint holds all 63,488."""
    geometry = PageGeometry.of(contract)
    tokens = geometry.page_tokens + 1
    everything = np.arange(1 << 16, dtype=np.uint16)
    finite = everything[np.isfinite(everything.view(np.float16))]
    pages = geometry.empty(tokens)
    pages[0] = np.resize(finite, geometry.shape)
    decode = four.vd if name == "vllm" else four.md
    prompt = exact_prompt(llama_dir, tokens, seed=34)
    body = completion(tokens, salt=f"given {name}", prompt=prompt, max_tokens=1)
    with witness.watched(folder):
        leg = given(decode, COMPLETIONS, body, ids_of(llama_dir, prompt), pages)
    held = tokens_of(witness.read(folder, leg.room, decode.name), decode.spec.engine, tokens)
    assert same_bits(
        held[:, :, : geometry.page_tokens], pages[0].view(np.float16).astype(np.float32)
    )


@pytest.mark.parametrize("tokens", LENGTHS)
def test_pages_of_the_dtype_that_is_computed_in_change_no_bit(
    folder: Path, llama_dir: Path, contract: Contract, sixteen: Pair, tokens: int
) -> None:
    """Computed in float16 on both ends: what decode holds is what prefill computed."""
    body = completion(tokens, salt="sixteen", prompt=exact_prompt(llama_dir, tokens, seed=33))
    held = handed_over(folder, sixteen, body, tokens)
    assert held.computed.dtype == np.float16
    assert same_bits(held.imported[:, :, : tokens - 1], held.computed[:, :, : tokens - 1])


@pytest.fixture(scope="module")
def sixteen(folder: Path, llama_dir: Path, contract: Contract) -> Iterator[Pair]:
    """MLX to MLX, in float16 throughout."""
    env, compute = witness.environment(folder), ComputeDtype.FLOAT16
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(
                MlxWitness(folder, name, role, llama_dir, contract, compute=compute, env=env)
            )
            for name, role in (("mp3", Role.PREFILL), ("md3", Role.DECODE))
        )
        yield Pair(prefill, decode)
