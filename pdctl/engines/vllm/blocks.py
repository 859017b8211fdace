"""Which conversion an engine's registered KV memory needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pdctl.engines.vllm.interface import Blocks
from pdctl.engines.vllm.layout import CpuBlocks, in_order
from pdctl.handoff.page import PageGeometry


def open_blocks(caches: Mapping[str, torch.Tensor], pages: PageGeometry, config: Any) -> Blocks:
    """Args:
        caches: what vLLM registers, a tensor per attention layer.
        config: the `VllmConfig` that they were made for.

    Raises:
        ValueError: KV memory that pdctl does not convert, by device, backend and shape.
    """
    device = next(iter(caches.values())).device.type
    if device == "cpu":
        return CpuBlocks(caches, pages)
    if device != "cuda":
        raise ValueError(f"KV memory on a device of type {device} is not converted")
    from pdctl.engines.vllm.cuda import CudaBlocks
    from pdctl.engines.vllm.cuda_proof import check

    layers = config.compilation_config.static_forward_context
    attention = layers[in_order(caches)[0]]
    block_tokens = config.cache_config.block_size
    blocks = CudaBlocks(caches, pages, attention.attn_backend, block_tokens)
    check(blocks, attention, pages)
    return blocks
