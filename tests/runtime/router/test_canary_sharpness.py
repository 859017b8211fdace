"""The canary's comparison on real MLX arithmetic: rounding passes, wrong KV does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import tiny

from pdctl.runtime.router.canary import BOUNDS, PROMPT, TOKENS, TOP
from pdctl.runtime.router.ranking import Step, Token, difference
from pdctl.topology.model import Dtype

mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm")

pytestmark = pytest.mark.engine

Layers = list[tuple[np.ndarray, np.ndarray]]
"""K and V per layer, each [1, kv_heads, tokens, head_dim]."""

BOUND = BOUNDS[Dtype.FLOAT16]


@cache
def loaded(family: str, rope_theta: float) -> tuple[Any, list[int]]:
    with TemporaryDirectory() as folder:
        path = tiny.make_checkpoint(Path(folder) / "m", family, rope_theta=rope_theta)
        model, tokenizer = mlx_lm.load(str(path))
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
        return model, tokenizer.encode(PROMPT)


def prefilled(family: str, rope_theta: float = tiny.ROPE_THETA) -> Layers:
    from mlx_lm.models.cache import KVCache

    model, tokens = loaded(family, rope_theta)
    caches = [KVCache() for _ in model.layers]
    model(mx.array(tokens[:-1])[None], cache=caches)
    return [
        (np.array(c.keys[:, :, : c.offset]), np.array(c.values[:, :, : c.offset])) for c in caches
    ]


def decoded(family: str, layers: Layers) -> list[Step]:
    """What a decode engine samples on these pages, recomputing the last prompt token."""
    from mlx_lm.models.cache import KVCache

    model, tokens = loaded(family, tiny.ROPE_THETA)
    caches = [KVCache() for _ in layers]
    for cached, (keys, values) in zip(caches, layers, strict=True):
        cached.update_and_fetch(*(mx.array(a.astype(np.float32)) for a in (keys, values)))
    steps, token = [], tokens[-1]
    for _ in range(TOKENS):
        logits = model(mx.array([[token]]), cache=caches)[0, -1]
        logprobs = np.array(logits - mx.logsumexp(logits))
        top = np.argsort(-logprobs)[:TOP]
        token = int(top[0])
        steps.append(Step(token, tuple(Token(int(i), float(logprobs[i])) for i in top)))
    return steps


def in_float16(layers: Layers) -> Layers:
    return [(k.astype(np.float16), v.astype(np.float16)) for k, v in layers]


def zero(layers: Layers) -> Layers:
    return [(k * 0, v * 0) for k, v in layers]


def swapped(layers: Layers) -> Layers:
    return [(v, k) for k, v in layers]


def shifted(layers: Layers) -> Layers:
    """One token too late: the first slot is empty, the last token is lost."""

    def late(a: np.ndarray) -> np.ndarray:
        return np.concatenate([a[:, :, :1] * 0, a[:, :, :-1]], axis=2)

    return [(late(k), late(v)) for k, v in layers]


def keys_shifted(layers: Layers) -> Layers:
    return [(np.roll(k, 1, axis=2), v) for k, v in layers]


def heads_swapped(layers: Layers) -> Layers:
    return [(k[:, ::-1], v[:, ::-1]) for k, v in layers]


def layers_swapped(layers: Layers) -> Layers:
    return layers[::-1]


def tail_page_missing(layers: Layers) -> Layers:
    return [
        (
            np.where(np.arange(k.shape[2])[:, None] < 64, k, 0),
            v * (np.arange(v.shape[2])[:, None] < 64),
        )
        for k, v in layers
    ]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_right_kv_in_16_bits_passes(family: str) -> None:
    layers = prefilled(family)
    alone, handed = decoded(family, layers), decoded(family, in_float16(layers))
    assert difference(alone, handed, BOUND) is None
    assert difference(alone, handed, BOUND / 5) is None


@pytest.mark.parametrize(
    "wrong",
    [zero, swapped, shifted, keys_shifted, heads_swapped, layers_swapped, tail_page_missing],
)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_wrong_kv_is_told(family: str, wrong: Callable[[Layers], Layers]) -> None:
    """U13, U16: zero, swapped, shifted or missing KV cannot become ready."""
    layers = prefilled(family)
    handed = decoded(family, in_float16(wrong(layers)))
    assert difference(decoded(family, layers), handed, BOUND) is not None


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_another_rope_theta_is_told(family: str) -> None:
    """Plausible text, wrong rotation: the trap of a rope_theta that an engine reads wrongly."""
    handed = decoded(family, in_float16(prefilled(family, 10000.0)))
    assert difference(decoded(family, prefilled(family)), handed, BOUND) is not None
