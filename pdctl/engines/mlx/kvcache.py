"""KV caches of the batch: mlx-lm's own, without its needless copies and its change of dtype.

mlx-lm merges single caches into a batch by copying them, gathers rows even when it keeps all
of them, and 0.31.3 widens a batch to float32 when an empty prompt joins it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import BatchKVCache, KVCache


class BatchCache(BatchKVCache):  # type: ignore[misc]
    """`[batch, kv_heads, capacity, head_dim]`, rows padded on the left."""

    keys: Any
    values: Any

    @classmethod
    def adopting(cls, cache: Any) -> BatchCache:
        """A batch of one that takes over the arrays of a single sequence's cache."""
        batch = cls([0])
        batch.keys, batch.values = cache.keys, cache.values
        batch.offset = batch.offset + cache.offset
        batch._idx = cache.offset
        return batch

    def extend(self, other: Any) -> None:
        held = self.keys if self.keys is not None else other.keys
        super().extend(other)
        if held is not None and self.keys.dtype != held.dtype:
            self.keys = self.keys.astype(held.dtype)
            self.values = self.values.astype(held.dtype)

    def filter(self, batch_indices: list[int]) -> None:
        if batch_indices != list(range(self.offset.shape[0])):
            super().filter(batch_indices)


class SequenceCache(KVCache):  # type: ignore[misc]
    """One sequence's cache, `[1, kv_heads, capacity, head_dim]`."""

    keys: Any
    values: Any

    @classmethod
    def holding(cls, keys: Any, values: Any, positions: int) -> SequenceCache:
        cache = cls()
        cache.keys, cache.values, cache.offset = keys, values, positions
        return cache

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        if all(cache.empty() for cache in caches):
            return BatchCache([0] * len(caches))
        if len(caches) == 1:
            return BatchCache.adopting(caches[0])
        merged = BatchKVCache.merge(caches)
        merged.__class__ = BatchCache
        return merged


def empty_caches(layers: int) -> list[SequenceCache]:
    return [SequenceCache() for _ in range(layers)]


def taken_over(caches: Sequence[Any]) -> list[SequenceCache]:
    """The library's single-sequence caches as ours; arrays are shared, not copied."""
    return [SequenceCache.holding(c.keys, c.values, c.offset) for c in caches]
