"""The proof, at start, that slots are read and written as SGLang itself does (CUDA).

Distinct numbers are written into memory of our own with the pool's own operator and read with our
kernel; then the pages that came out are written with it and compared, to the bit, with what the
pool wrote.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pdctl.engines.cuda.proof import by_layer, numbers, read_step
from pdctl.engines.sglang.cuda import CudaSlots, Span
from pdctl.engines.sglang.pool import PAGE_DTYPES
from pdctl.handoff.page import PATTERN, PageGeometry, Patterns
from pdctl.topology.model import Dtype

SEQUENCE = (2, 1)
"""The blocks of the prompt, not in order. Block 0 is never a prompt's: its first slot takes what is
padding, and SGLang's operator writes nothing there."""


def check(slots: CudaSlots, pool: Any, pages: PageGeometry) -> None:
    """Raises ValueError, naming the pool, where what comes out is not what went in."""
    tokens = pages.page_tokens + pages.page_tokens // 2 + 1
    at = torch.arange(tokens)
    row = torch.tensor(SEQUENCE)[at // pages.page_tokens] * pages.page_tokens
    row = (row + at % pages.page_tokens).to(pool.k_buffer[0].device)
    theirs, ours = _twin(pool, pages), _twin(pool, pages)
    written, copied = slots.over(theirs, row[None]), slots.over(ours, row[None])
    wanted = numbers(pages, tokens, PAGE_DTYPES[Dtype(pages.dtype)])
    try:
        _write(theirs, row, wanted, tokens, pages)
        found = slots.page_memory(wanted.nbytes).view(PATTERN).reshape(wanted.shape)
        read_step(written, Span(0, 0, tokens, found))
        sound = np.array_equal(found, wanted)
        copied.fence()
        for page, block in enumerate(SEQUENCE):
            count = min(pages.page_tokens, tokens - page * pages.page_tokens)
            copied.write(block, range(count), 0, found[page])
        copied.flush()
        sound = sound and all(map(torch.equal, _layers(theirs), _layers(ours)))
    finally:
        written.close()
        copied.close()
    if not sound:
        layout = getattr(pool, "kv_cache_layout", "nhd")
        raise ValueError(f"{type(pool).__name__} ({layout}) packs its slots in an unknown way")


def _twin(pool: Any, pages: PageGeometry) -> Any:
    """The pool with small buffers of its own, zeroed."""
    twin = copy.copy(pool)
    slots = (max(SEQUENCE) + 1) * pages.page_tokens
    twin.size = slots - pages.page_tokens
    twin.k_buffer = [torch.zeros_like(layer[:slots]) for layer in pool.k_buffer]
    twin.v_buffer = [torch.zeros_like(layer[:slots]) for layer in pool.v_buffer]
    return twin


def _layers(pool: Any) -> list[torch.Tensor]:
    return [*pool.k_buffer, *pool.v_buffer]


def _write(
    pool: Any, row: torch.Tensor, source: Patterns, tokens: int, pages: PageGeometry
) -> None:
    """With SGLang's operator, layer by layer."""
    pairs = by_layer(source, tokens, PAGE_DTYPES[Dtype(pages.dtype)], pool.k_buffer[0])
    for layer, (keys, values) in enumerate(pairs, getattr(pool, "start_layer", 0)):
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), row, keys, values)
