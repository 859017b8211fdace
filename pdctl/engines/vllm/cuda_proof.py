"""The proof, at start, that blocks are read and written as vLLM itself does (CUDA).

Distinct numbers are written into memory of our own with the attention backend's own operator and
read with our kernel; then the pages that came out are written with it and compared, to the bit,
with what the backend wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from pdctl.engines.cuda.proof import by_layer, numbers, read_step
from pdctl.engines.vllm.cuda import CudaBlocks
from pdctl.engines.vllm.cuda_layout import Backend, like
from pdctl.engines.vllm.interface import Span
from pdctl.engines.vllm.layout import PAGE_DTYPES
from pdctl.handoff.page import PATTERN, PageGeometry, Patterns
from pdctl.topology.model import Dtype

SEQUENCE = (2, 0)
"""The blocks of the prompt; the block between them must stay as it is."""


class Attention(Protocol):
    """vLLM's attention layer, as far as it is used here."""

    attn_backend: Backend
    impl: Any


def check(blocks: CudaBlocks, attention: Attention, pages: PageGeometry) -> None:
    """Raises ValueError, naming the layout, where what comes out is not what went in."""
    written, copied = _twin(blocks, attention), _twin(blocks, attention)
    tokens = blocks.block_tokens + blocks.block_tokens // 2 + 1
    wanted = numbers(pages, tokens, PAGE_DTYPES[Dtype(pages.dtype)])
    try:
        _write(written, attention, wanted, tokens, pages)
        found = _read(written, tokens, pages)
        sound = np.array_equal(found, wanted)
        copied.fence()
        for page in range(len(found)):
            start = page * pages.page_tokens
            stop = min(start + pages.page_tokens, tokens)
            copied.write(SEQUENCE, start, stop, 0, found[page])
        copied.flush()
        sound = sound and all(map(torch.equal, written.layers, copied.layers))
    finally:
        written.close()
        copied.close()
    if not sound:
        raise ValueError(f"vLLM's blocks ({blocks.layout.name}) are packed in an unknown way")


def _twin(blocks: CudaBlocks, attention: Attention) -> CudaBlocks:
    """Blocks of the same layout in memory of their own, zeroed."""
    count = (max(SEQUENCE) + 1) * blocks.block_tokens // blocks.layout.slots
    caches: Mapping[str, torch.Tensor] = {
        name: like(memory, attention.attn_backend, count)
        for name, memory in zip(blocks.names, blocks.layers, strict=True)
    }
    return blocks.over(caches)


def _write(
    blocks: CudaBlocks, attention: Attention, source: Patterns, tokens: int, pages: PageGeometry
) -> None:
    """With vLLM's operator, layer by layer."""
    at = torch.arange(tokens)
    slots = torch.tensor(SEQUENCE)[at // blocks.block_tokens] * blocks.block_tokens
    slots = (slots + at % blocks.block_tokens).to(blocks.layers[0].device)
    pairs = by_layer(source, tokens, PAGE_DTYPES[Dtype(pages.dtype)], blocks.layers[0])
    for memory, (keys, values) in zip(blocks.layers, pairs, strict=True):
        attention.impl.do_kv_cache_update(attention, keys, values, memory, slots)


def _read(blocks: CudaBlocks, tokens: int, pages: PageGeometry) -> Patterns:
    size = pages.pages_for(tokens) * pages.page_bytes
    found = blocks.page_memory(size).view(PATTERN).reshape(-1, *pages.shape)
    read_step(blocks, Span(SEQUENCE, 0, tokens, found))
    return found
