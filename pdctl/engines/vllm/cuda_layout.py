"""Where an attention backend of vLLM keeps a token's K and V, as strides (CUDA).

Backends name their dimensions by the order of `get_kv_cache_shape`, and lay them out in another
one: `[blocks, heads, block, 2 * dim]` in 0.28.0 to 0.32.0 (K and V packed), `[2, blocks, block,
heads, dim]` or `[blocks, 2, block, heads, dim]` before; with `NHD` a token's heads lie together,
with `HND` a head's tokens do. A shape alone tells neither: four heads and blocks of four look
alike. So the backend is asked with numbers that occur once each, and the strides are the
registered memory's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch

from pdctl.handoff.page import PageGeometry

_BLOCKS, _BLOCK, _HEADS, _DIM = 10007, 48, 13, 88
"""Asked of a backend: blocks, tokens per block, heads and head dim, no two of them alike."""


class Backend(Protocol):
    """vLLM's `AttentionBackend`, as far as it is used here."""

    def get_name(self) -> str: ...

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]: ...


class Axes(msgspec.Struct, frozen=True):
    """Which dimension of a layer's tensor is which; `halves` None: K and V share the last one."""

    blocks: int
    slots: int
    heads: int
    dim: int
    halves: int | None


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Strides in elements of the engine's dtype; a head's elements are adjacent."""

    name: str
    slots: int
    """Tokens per block of the tensor; vLLM's own blocks are a multiple of them."""
    block_stride: int
    slot_stride: int
    half_stride: int
    """From a token's K to its V."""
    head_stride: int

    def place(self, slot: Any) -> Any:
        """Offset of a slot (block id * tokens per block + place in it): int or integer array."""
        return slot // self.slots * self.block_stride + slot % self.slots * self.slot_stride


def axes_of(backend: Backend) -> Axes:
    """Raises ValueError, naming the backend, where its shape is none that pdctl knows."""
    name = backend.get_name()
    shape = list(backend.get_kv_cache_shape(_BLOCKS, _BLOCK, _HEADS, _DIM))
    packed = len(shape) == 4
    expected = [_BLOCKS, _BLOCK, _HEADS, 2 * _DIM] if packed else [_BLOCKS, _BLOCK, _HEADS, _DIM, 2]
    if sorted(shape) != sorted(expected):
        raise ValueError(f"vLLM's {name} keeps KV as {tuple(shape)}, which pdctl does not convert")
    blocks, slots, heads, dim = map(shape.index, expected[:4])
    return Axes(blocks, slots, heads, dim, None if packed else shape.index(2))


def layout_of(
    backend: Backend, layers: Sequence[torch.Tensor], pages: PageGeometry, block_tokens: int
) -> Layout:
    """The one layout of all layers.

    Args:
        layers: the registered memory, in the model's order.
        block_tokens: vLLM's block size, by which its block ids count.

    Raises:
        ValueError: layers that differ, or memory that is not what the backend says.
    """
    first, axes = layers[0], axes_of(backend)
    same = {(m.shape, m.stride(), m.dtype) for m in layers} == {
        (first.shape, first.stride(), first.dtype)
    }
    if len(layers) != pages.layers or not same:
        raise ValueError(f"{len(layers)} layers were registered, and not all alike: {pages.layers}")
    slots = first.shape[axes.slots] if first.dim() > axes.slots else 0
    blocks = first.shape[axes.blocks] if first.dim() > axes.blocks else 0
    name = backend.get_name()
    told = backend.get_kv_cache_shape(blocks, slots or 16, pages.kv_heads, pages.head_dim)
    if tuple(told) != tuple(first.shape) or block_tokens % slots or first.stride(axes.dim) != 1:
        raise ValueError(
            f"vLLM's {name} registered {tuple(first.shape)} with strides {first.stride()} for "
            f"blocks of {block_tokens}, where {tuple(told)} was expected"
        )
    stride = first.stride()
    order = "HND" if stride[axes.slots] < stride[axes.heads] else "NHD"
    return Layout(
        name=f"{name} {order}" + (" packed" if axes.halves is None else ""),
        slots=slots,
        block_stride=stride[axes.blocks],
        slot_stride=stride[axes.slots],
        half_stride=pages.head_dim if axes.halves is None else stride[axes.halves],
        head_stride=stride[axes.heads],
    )


def like(memory: torch.Tensor, backend: Backend, blocks: int) -> torch.Tensor:
    """Zeroed memory of that many blocks of its own, whose dimensions lie in the same order."""
    order = sorted(range(memory.dim()), key=memory.stride, reverse=True)
    sizes = list(memory.shape)
    sizes[axes_of(backend).blocks] = blocks
    made = torch.zeros([sizes[at] for at in order], dtype=memory.dtype, device=memory.device)
    return made.permute([order.index(at) for at in range(memory.dim())])
