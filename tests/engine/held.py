"""What two ends of a pair hold of one prompt, read from inside their processes (`witness.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from e2e.prompts import exact_prompt
from engine import witness
from engine.memory import same_bits, tokens_of
from engine.vllm_pairs import COMPLETIONS, completion
from engines.own_ends import captured
from engines.replicas import Pair, Process
from tokenizers import Tokenizer

from pdctl.handoff.page import PageGeometry, unpack

LENGTHS = (51, 64, 129, 700)


class MlxWitness(Process):
    module = "engine.witness_mlx"


class Held(msgspec.Struct):
    """Of one prompt, `[layers, 2, tokens, kv_heads, head_dim]`, each in its engine's dtype."""

    computed: Any
    imported: Any


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
