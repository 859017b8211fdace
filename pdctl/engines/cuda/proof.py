"""What the adapters' proofs at start have in common: numbers that go through an engine's own
operator and through the kernel, compared to the bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import torch

from pdctl.engines.exports import Memory
from pdctl.handoff.page import PATTERN, PageGeometry, Patterns

WAIT_S = 60.0
"""The kernel is compiled meanwhile."""

Span = TypeVar("Span")


def numbers(pages: PageGeometry, tokens: int, dtype: torch.dtype) -> Patterns:
    """Pages of whole numbers that every dtype holds; slots past the last token are zero.

    Args:
        dtype: of the pages.
    """
    rng = np.random.default_rng(0)
    shape = (pages.pages_for(tokens), *pages.shape)
    made = torch.from_numpy(rng.integers(-128, 128, shape).astype(np.float32))
    made[-1, :, :, (tokens - 1) % pages.page_tokens + 1 :] = 0
    found: Patterns = made.to(dtype).view(torch.int16).numpy().view(PATTERN)
    return found


def by_layer(
    source: Patterns, tokens: int, page_dtype: torch.dtype, like: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer, `[tokens, kv_heads, head_dim]` each, where and as `like` is."""
    values = torch.from_numpy(source.view(np.int16)).view(page_dtype)
    for layer in range(values.shape[1]):
        halves = values[:, layer].to(like.device, like.dtype).transpose(0, 1)
        keys, vals = halves.flatten(1, 2)[:, :tokens].unbind(0)
        yield keys.contiguous(), vals.contiguous()


def read_step(memory: Memory[Span], span: Span) -> None:
    """One step that brings out this span alone, landed. Raises ValueError where it does not."""
    landed, layers = threading.Event(), len(memory.names)
    memory.begin_step([span])
    for layer in range(layers):
        memory.gather(layer, landed.set if layer + 1 == layers else lambda: None)
    if not landed.wait(WAIT_S):
        raise ValueError(f"nothing was copied out of the engine's memory within {WAIT_S:g} s")
