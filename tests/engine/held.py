"""What two ends of a pair hold of one prompt, read from inside their processes (`witness.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from e2e.prompts import exact_prompt
from engine import witness
from engine.vllm_pairs import COMPLETIONS, completion
from engines.own_ends import captured
from engines.replicas import Pair, Process
from engines.vllm_replicas import VllmProcess
from tokenizers import Tokenizer

from pdctl.engines.interface import Command
from pdctl.handoff.page import PageGeometry, unpack
from pdctl.topology.model import Engine

LENGTHS = (51, 64, 129, 700)


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


def tokens_of(memory: np.ndarray, engine: Engine, tokens: int) -> np.ndarray:
    """An engine's memory as `[layers, 2, tokens, kv_heads, head_dim]`.

    vLLM's blocks on a CPU hold, per head, K transposed and then V.
    """
    if engine is Engine.SGLANG:
        return memory[:, :, :tokens]
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
    with witness.watched(folder):
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


def check_rounded_once(folder: Path, model_dir: Path, pair: Pair, name: str, tokens: int) -> None:
    """What decode imports is prefill's, rounded; the pages hold the same."""
    prompt = exact_prompt(model_dir, tokens, seed=31)
    body = completion(tokens, salt=f"held {name}", prompt=prompt)
    rounded = rounded_once(folder, pair, body, tokens)
    sent = captured(pair.prefill, COMPLETIONS, body, ids_of(model_dir, prompt))
    keys, values = unpack(PageGeometry.of(pair.prefill.contract), sent.pages, tokens)
    assert same_bits(np.stack([keys, values], axis=1), rounded.view(np.uint16))


def rounded_once(folder: Path, pair: Pair, body: dict[str, Any], tokens: int) -> np.ndarray:
    """What decode imports is prefill's float32 rounded to float16, which is returned, no bit
    otherwise; it is not what decode would compute, which has no rounding in it."""
    held = handed_over(folder, pair, body, tokens)
    rounded: np.ndarray = held.computed.astype(np.float16)
    count = tokens - pair.decode.spec.recomputes_last_token
    imported = held.imported[:, :, :count]
    assert same_bits(imported, rounded[:, :, :count].astype(np.float32))
    assert not same_bits(imported, held.computed[:, :, :count])
    return rounded
