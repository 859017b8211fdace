"""Canonical pages into a preallocated KV cache, as they arrive.

Memory is allocated and evaluated on the engine loop's thread, whose stream owns it; the
handoff's thread then writes through numpy views of the same memory. When the last page is in,
the views are dropped and the arrays are the cache: nothing is copied again.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pdctl.engines.mlx.exporter import MLX_DTYPES
from pdctl.engines.mlx.kvcache import SequenceCache
from pdctl.topology.contract import Attention
from pdctl.topology.model import PAGE_TOKENS, ComputeDtype, Dtype

COMPUTE_DTYPES = {
    ComputeDtype.FLOAT16: mx.float16,
    ComputeDtype.BFLOAT16: mx.bfloat16,
    ComputeDtype.FLOAT32: mx.float32,
}

CAPACITY_STEP = SequenceCache.step
"""Positions by which mlx-lm grows a cache."""


class ImportedCache:
    """KV of `positions` tokens, being filled. Made on the loop's thread."""

    def __init__(
        self, attention: Attention, positions: int, pages: Dtype, compute: ComputeDtype
    ) -> None:
        self.positions = positions
        self._compute = COMPUTE_DTYPES[compute]
        # numpy has no bfloat16: 16-bit memory is filled as bit patterns
        wide = self._compute is mx.float32
        self._table = None if pages.value == compute.value else conversion(pages, compute)
        capacity = -(-(positions + 1) // CAPACITY_STEP) * CAPACITY_STEP
        shape = (1, attention.kv_heads, capacity, attention.head_dim)
        kind = mx.float32 if wide else mx.uint16
        self._arrays = [mx.zeros(shape, dtype=kind) for _ in range(2 * attention.layers)]
        mx.eval(self._arrays)
        self._views = [np.array(array, copy=False)[0] for array in self._arrays]

    def write(self, page: int, first_layer: int, piece: NDArray[np.uint16]) -> None:
        """Places `[layers, 2, 64, kv_heads, head_dim]`; positions past the last are dropped.
        Any one thread at a time."""
        start = page * PAGE_TOKENS
        stop = min(start + PAGE_TOKENS, self.positions)
        if not 0 <= start < stop:
            raise ValueError(f"page {page} lies past position {self.positions}")
        values = piece[:, :, : stop - start]
        if self._table is not None:
            values = self._table[values]
        flat = values.reshape(-1, *values.shape[2:])
        for view, tokens in zip(self._views[2 * first_layer :], flat, strict=False):
            view[:, start:stop] = tokens.transpose(1, 0, 2)

    def caches(self) -> list[SequenceCache]:
        """The filled caches, one per layer; on the loop's thread, once, after the last write."""
        self._views.clear()
        arrays = [a if a.dtype == self._compute else a.view(self._compute) for a in self._arrays]
        self._arrays.clear()
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        return [SequenceCache.holding(k, v, self.positions) for k, v in pairs]


@functools.cache
def conversion(source: Dtype, target: ComputeDtype) -> NDArray[Any]:
    """The target value (float32, or 16-bit pattern) of each of the 65,536 source patterns.

    A look-up is several times quicker than numpy's own float16 conversion, and knows bfloat16.
    """
    patterns = mx.array(np.arange(1 << 16, dtype=np.uint16)).view(MLX_DTYPES[source])
    values = patterns.astype(COMPUTE_DTYPES[target])
    if target is not ComputeDtype.FLOAT32:
        values = values.view(mx.uint16)
    mx.eval(values)
    return np.array(values)
