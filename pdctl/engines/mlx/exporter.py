"""KV positions out of a batch's caches, into canonical pages. Runs on the engine loop's thread."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pdctl.handoff.device import Pages, host_pages
from pdctl.topology.model import PAGE_TOKENS, Dtype
from pdctl.trace import monotonic_s

Uint16 = NDArray[np.uint16]

MLX_DTYPES = {Dtype.FLOAT16: mx.float16, Dtype.BFLOAT16: mx.bfloat16}


class PageTarget(Protocol):
    """The part of `pdctl.handoff.sender.Outbound` that an exporter needs."""

    def pages(self) -> Pages:
        """`[pages, layers, 2, 64, kv_heads, head_dim]`."""
        ...

    def written(self, tokens: int, computed_at: float | None = None) -> None: ...


class Export:
    """One prompt's positions on their way out; `held` of them are in the pages."""

    def __init__(self, target: PageTarget, dtype: Dtype) -> None:
        self._target = target
        self._dtype = MLX_DTYPES[dtype]
        self.held = 0

    def take(self, caches: list[Any], row: int, positions: int) -> None:
        """Copies positions [held, positions) of one row of a batch, every layer at once."""
        if positions <= self.held:
            return
        computed_at = monotonic_s()
        piece = read_positions(caches, row, self.held, positions, self._dtype)
        scatter(piece, host_pages(self._target.pages()), self.held)
        self.held = positions
        self._target.written(positions, computed_at)


def read_positions(caches: list[Any], row: int, start: int, stop: int, dtype: mx.Dtype) -> Uint16:
    """Bit patterns `[layers, 2, stop - start, kv_heads, head_dim]`, in one evaluation."""
    arrays = [array for cache in caches for array in (cache.keys, cache.values)]
    pad = _padding(caches[0], row)
    heads, head_dim = arrays[0].shape[1], arrays[0].shape[3]
    shape = (len(caches), 2, heads, stop - start, head_dim)
    stacked = mx.stack([a[row, :, pad + start : pad + stop] for a in arrays]).astype(dtype)
    piece = mx.contiguous(stacked.reshape(shape).transpose(0, 1, 3, 2, 4)).view(mx.uint16)
    mx.eval(piece)
    return np.array(piece, copy=False)


def _padding(cache: Any, row: int) -> int:
    padding = getattr(cache, "left_padding", None)
    return 0 if padding is None else int(padding[row].item())


def scatter(piece: Uint16, pages: Uint16, start: int) -> None:
    """Writes positions [start, start + n) of `piece` into the pages that hold them."""
    at, stop = start, start + piece.shape[2]
    while at < stop:
        page, slot = divmod(at, PAGE_TOKENS)
        count = min(PAGE_TOKENS - slot, stop - at)
        pages[page, :, :, slot : slot + count] = piece[:, :, at - start : at - start + count]
        at += count
