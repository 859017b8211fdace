"""What a decode engine holds after a handoff is, bit for bit, what the prefill engine computed.

Both engines' own memory is read, each from inside its process (`witness.py`), and the pages
between them by a receiver of the test's own. Nothing of pdctl's conversions is used to read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from e2e.prompts import exact_prompt
from engine import witness
from engine.vllm_pairs import COMPLETIONS, Four, completion
from engines.own_ends import captured, given
from engines.replicas import Pair, Process, contract_of
from engines.vllm_replicas import VllmProcess, needs_vllm
from tokenizers import Tokenizer

from pdctl.engines.interface import Command
from pdctl.handoff.page import PageGeometry, unpack
from pdctl.topology.contract import Contract
from pdctl.topology.model import ComputeDtype, Engine, Role

pytestmark = pytest.mark.engine

LENGTHS = (51, 64, 129, 700)
PAIRS = ("vllm>vllm", "vllm>mlx", "mlx>vllm", "mlx>mlx")
BLOCK_TOKENS = 64


class MlxWitness(Process):
    module = "engine.witness_mlx"


class VllmWitness(VllmProcess):
    def command(self) -> Command:
        known = super().command()
        named = {
            "pdctl.engines.vllm.connector": "engine.witness_vllm",
            "PdctlConnector": "WitnessConnector",
        }
        argv = list(known.argv)
        at = argv.index("--kv-transfer-config") + 1
        for name, instead in named.items():
            assert name in argv[at]
            argv[at] = argv[at].replace(name, instead)
        return msgspec.structs.replace(known, argv=tuple(argv))


class Held(msgspec.Struct):
    """Of one prompt, `[layers, 2, tokens, kv_heads, head_dim]`, each in its engine's dtype."""

    computed: Any
    imported: Any


@pytest.fixture(scope="module")
def contract(llama_dir: Path) -> Contract:
    return contract_of(llama_dir)


@pytest.fixture(scope="module")
def four(folder: Path, llama_dir: Path, contract: Contract) -> Iterator[Four]:
    """All in float32, with float16 pages; vLLM computes prompts in chunks of 256 tokens."""
    env = witness.environment(folder)
    with ExitStack() as stack:
        vp, vd = (
            stack.enter_context(
                VllmWitness(
                    *(folder, name, role, llama_dir, contract),
                    env=env,
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


def tokens_of(memory: np.ndarray, engine: Engine, tokens: int) -> np.ndarray:
    """An engine's memory as `[layers, 2, tokens, kv_heads, head_dim]`.

    vLLM's blocks on a CPU hold, per head, K transposed and then V.
    """
    if engine is Engine.MLX:
        return memory.transpose(0, 1, 3, 2, 4)[:, :, :tokens]
    layers, blocks, heads, size, width = memory.shape
    halves = memory.reshape(layers, blocks, heads, 2, -1)
    keys = halves[:, :, :, 0].reshape(layers, blocks, heads, width // 2, size)
    values = halves[:, :, :, 1].reshape(layers, blocks, heads, size, width // 2)
    ordered = np.stack([keys.transpose(0, 1, 4, 2, 3), values.transpose(0, 1, 3, 2, 4)], axis=1)
    return ordered.reshape(layers, 2, blocks * size, heads, width // 2)[:, :, :tokens]


def handed_over(folder: Path, pair: Pair, body: dict[str, Any], tokens: int) -> Held:
    leg = pair.leg()
    (prefilled, answer), (decoded, whole) = pair.post(COMPLETIONS, body, leg)
    assert (prefilled, decoded) == (200, 200), (answer, whole)
    assert whole["usage"]["prompt_tokens"] == tokens
    found = [
        tokens_of(witness.read(folder, leg.room, each.name), each.spec.engine, tokens)
        for each in (pair.prefill, pair.decode)
    ]
    return Held(*found)


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Also of zeros with a sign; `array_equal` alone takes those for equal."""
    assert left.dtype == right.dtype
    return left.tobytes() == right.tobytes()


def ids_of(model_dir: Path, prompt: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return list(tokenizer.encode(prompt).ids)


@needs_vllm
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", PAIRS)
def test_decode_holds_prefills_numbers_rounded_once(
    folder: Path, llama_dir: Path, contract: Contract, four: Four, name: str, tokens: int
) -> None:
    """R25: positions 0 to n-2 are prefill's float32 rounded to float16, no bit otherwise; they
    are not what decode would compute, which has no rounding in it. The pages hold the same."""
    pair = four.pair(name)
    prompt = exact_prompt(llama_dir, tokens, seed=31)
    body = completion(tokens, salt=f"held {name}", prompt=prompt)
    held = handed_over(folder, pair, body, tokens)
    rounded = held.computed.astype(np.float16)
    imported = held.imported[:, :, : tokens - 1]
    assert same_bits(imported, rounded[:, :, : tokens - 1].astype(np.float32))
    assert not same_bits(imported, held.computed[:, :, : tokens - 1])
    sent = captured(pair.prefill, COMPLETIONS, body, ids_of(llama_dir, prompt))
    keys, values = unpack(PageGeometry.of(contract), sent.pages, tokens)
    assert same_bits(np.stack([keys, values], axis=1), rounded.view(np.uint16))


@needs_vllm
def test_vllms_blocks_are_copied_as_they_are(folder: Path, llama_dir: Path, four: Four) -> None:
    """Two whole blocks as memory, however it is laid out: decode's are prefill's, rounded."""
    pair = four.pair("vllm>vllm")
    tokens = 2 * BLOCK_TOKENS + 1
    leg = pair.leg()
    prompt = exact_prompt(llama_dir, tokens, seed=32)
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
