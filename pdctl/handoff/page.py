"""The canonical page: 64 tokens of KV, every layer, as 16-bit patterns (DESIGN §6).

    [layer][K, V][64][kv_head][head_dim], little-endian, K after RoPE

Values are never converted here: float16 and bfloat16 both travel as `uint16` patterns.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdctl.topology.contract import Contract
from pdctl.topology.model import PAGE_TOKENS, Dtype

Patterns = NDArray[np.uint16]
"""Bit patterns of float16 or bfloat16, little-endian."""

PATTERN = np.dtype("<u2")


class PageGeometry(msgspec.Struct, frozen=True):
    """The shape that both ends of a handoff agree on; it follows from the contract."""

    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int = PAGE_TOKENS
    dtype: str = Dtype.FLOAT16

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "page_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in tuple(Dtype):
            raise ValueError(f"pages are float16 or bfloat16, not {self.dtype}")

    @classmethod
    def of(cls, contract: Contract) -> PageGeometry:
        a = contract.attention
        return cls(a.layers, a.kv_heads, a.head_dim, contract.page_tokens, contract.dtype)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of one page: `(layers, 2, page_tokens, kv_heads, head_dim)`."""
        return (self.layers, 2, self.page_tokens, self.kv_heads, self.head_dim)

    @property
    def layer_bytes(self) -> int:
        """K and V of one layer of one page."""
        return 2 * self.page_tokens * self.kv_heads * self.head_dim * PATTERN.itemsize

    @property
    def page_bytes(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """K and V of one token, every layer."""
        return self.page_bytes // self.page_tokens

    def pages_for(self, tokens: int) -> int:
        """Pages that hold positions [0, tokens)."""
        return -(-tokens // self.page_tokens)

    def empty(self, tokens: int) -> Patterns:
        """Zeroed pages for that many tokens: `[pages, *shape]`."""
        return np.zeros((self.pages_for(tokens), *self.shape), dtype=PATTERN)

    def over(self, memory: NDArray[np.uint8], tokens: int) -> Patterns:
        """Pages in memory of exactly their bytes; the slots past the last token are zero."""
        pages = memory.view(PATTERN).reshape(self.pages_for(tokens), *self.shape)
        pages[-1, :, :, (tokens - 1) % self.page_tokens + 1 :] = 0
        return pages


def pack(geometry: PageGeometry, keys: Sequence[Patterns], values: Sequence[Patterns]) -> Patterns:
    """Pages of a whole prompt.

    Args:
        keys: one array of patterns `[tokens, kv_heads, head_dim]` per layer; `values` alike.

    Returns:
        `[pages, layers, 2, page_tokens, kv_heads, head_dim]`; slots past the last token are
        zero.

    Raises:
        ValueError: an array whose shape, type or number is not the geometry's.
    """
    if len(keys) != geometry.layers or len(values) != geometry.layers:
        raise ValueError(f"expected {geometry.layers} layers of keys and of values")
    tokens = len(keys[0])
    pages = geometry.empty(tokens)
    for layer, pair in enumerate(zip(keys, values, strict=True)):
        for half, source in enumerate(pair):
            _check(geometry, source, tokens)
            for page in range(len(pages)):
                start = page * geometry.page_tokens
                part = source[start : start + geometry.page_tokens]
                pages[page, layer, half, : len(part)] = part
    return pages


def unpack(
    geometry: PageGeometry, pages: Patterns, tokens: int
) -> tuple[list[Patterns], list[Patterns]]:
    """The inverse of `pack`: keys and values, one `[tokens, kv_heads, head_dim]` per layer.

    Raises:
        ValueError: fewer or more pages than that many tokens need.
    """
    if pages.shape != (geometry.pages_for(tokens), *geometry.shape):
        raise ValueError(f"{pages.shape} does not hold exactly {tokens} tokens")
    # [layers, 2, pages, page_tokens, kv_heads, head_dim]
    ordered = pages.transpose(1, 2, 0, 3, 4, 5)
    flat = ordered.reshape(geometry.layers, 2, -1, geometry.kv_heads, geometry.head_dim)
    cut = flat[:, :, :tokens]
    return [layer[0] for layer in cut], [layer[1] for layer in cut]


def _check(geometry: PageGeometry, source: Patterns, tokens: int) -> None:
    expected = (tokens, geometry.kv_heads, geometry.head_dim)
    if source.shape != expected or source.dtype != PATTERN:
        raise ValueError(f"expected uint16 {expected}, got {source.dtype} {source.shape}")
