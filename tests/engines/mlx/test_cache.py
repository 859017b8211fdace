"""Positions between a batch's caches and canonical pages, without a model."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx

from pdctl.engines.mlx.exporter import Export
from pdctl.engines.mlx.importer import ImportedCache
from pdctl.engines.mlx.kvcache import BatchCache, SequenceCache
from pdctl.handoff.page import PageGeometry
from pdctl.topology.contract import Attention
from pdctl.topology.model import ComputeDtype, Dtype

ATTENTION = Attention(kind="full", layers=3, kv_heads=2, head_dim=8)
GEOMETRY = PageGeometry(layers=3, kv_heads=2, head_dim=8)


class Target:
    def __init__(self, tokens: int) -> None:
        self._pages = GEOMETRY.empty(tokens)
        self.written_calls: list[int] = []

    def pages(self) -> np.ndarray:
        return self._pages

    def written(self, tokens: int, computed_at: float | None = None) -> None:
        self.written_calls.append(tokens)


def computed(tokens: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> list[SequenceCache]:
    """Caches that hold random values rounded to float16, as if a model had filled them."""
    random = np.random.default_rng(seed)
    caches = []
    for _ in range(ATTENTION.layers):
        pair = random.standard_normal((2, 1, 2, tokens, 8)).astype(np.float16)
        cache = SequenceCache()
        cache.update_and_fetch(mx.array(pair[0]).astype(dtype), mx.array(pair[1]).astype(dtype))
        caches.append(cache)
    return caches


def same(left: SequenceCache, right: SequenceCache) -> bool:
    n = left.offset
    return bool(
        mx.array_equal(left.keys[..., :n, :], right.keys[..., :n, :])
        and mx.array_equal(left.values[..., :n, :], right.values[..., :n, :])
    )


@pytest.mark.parametrize("tokens", [1, 50, 63, 64, 65, 128, 192, 700])
@pytest.mark.parametrize(
    ("dtype", "compute"),
    [(mx.float32, ComputeDtype.FLOAT32), (mx.float16, ComputeDtype.FLOAT16)],
)
def test_positions_survive_pages(tokens: int, dtype: mx.Dtype, compute: ComputeDtype) -> None:
    """R25: bit for bit, at every length around a page's end."""
    source, target = computed(tokens, dtype=dtype), Target(tokens)
    batch = [BatchCache.adopting(cache) for cache in source]
    Export(target, Dtype.FLOAT16).take(batch, 0, tokens)
    landed = ImportedCache(ATTENTION, tokens, Dtype.FLOAT16, compute)
    for page, values in enumerate(target.pages()):
        landed.write(page, 0, values[:2])
        landed.write(page, 2, values[2:])
    assert all(map(same, source, landed.caches()))


def test_chunks_export_the_same_pages_as_one_piece() -> None:
    """R25: a chunk may begin and end anywhere inside a page."""
    source = [BatchCache.adopting(cache) for cache in computed(300)]
    whole, pieces = Target(300), Target(300)
    Export(whole, Dtype.FLOAT16).take(source, 0, 300)
    export = Export(pieces, Dtype.FLOAT16)
    for stop in (1, 63, 65, 65, 200, 300):
        export.take(source, 0, stop)
    assert np.array_equal(whole.pages(), pieces.pages())
    assert pieces.written_calls == [1, 63, 65, 200, 300]
    assert not pieces.pages()[4, :, :, 300 - 256 :].any()


def test_a_padded_row_exports_its_own_positions() -> None:
    """A batch pads shorter prompts on the left."""
    caches = [computed(90, 1), computed(40, 2)]
    batch = [SequenceCache.merge(list(pair)) for pair in zip(*caches, strict=True)]
    for row, tokens in enumerate((90, 40)):
        alone, together = Target(tokens), Target(tokens)
        Export(alone, Dtype.FLOAT16).take(
            [BatchCache.adopting(cache) for cache in caches[row]], 0, tokens
        )
        Export(together, Dtype.FLOAT16).take(batch, row, tokens)
        assert np.array_equal(alone.pages(), together.pages())


def test_nothing_past_the_last_position_is_written() -> None:
    """R26: the tail of the memory stays as it was, whatever the last page's tail holds."""
    landed = ImportedCache(ATTENTION, 65, Dtype.FLOAT16, ComputeDtype.FLOAT32)
    page = np.full((3, 2, 64, 2, 8), 0x3C00, np.uint16)
    landed.write(0, 0, page)
    landed.write(1, 0, page)
    with pytest.raises(ValueError, match="past"):
        landed.write(2, 0, page)
    for cache in landed.caches():
        assert cache.offset == 65
        assert mx.all(cache.keys[..., :65, :] == 1).item()
        assert not mx.any(cache.keys[..., 65:, :]).item()


@pytest.mark.parametrize("compute", list(ComputeDtype))
def test_bfloat16_pages_reach_every_compute_dtype(compute: ComputeDtype) -> None:
    """numpy knows no bfloat16: values go by their patterns."""
    landed = ImportedCache(ATTENTION, 64, Dtype.BFLOAT16, compute)
    landed.write(0, 0, np.full((3, 2, 64, 2, 8), 0xC020, np.uint16))
    assert mx.all(landed.caches()[0].keys[..., :64, :] == -2.5).item()


def test_an_empty_prompt_that_joins_keeps_the_batch_in_its_dtype() -> None:
    """0.31.3 would widen it to float32, and exports would differ by rounding."""
    batch = BatchCache.adopting(computed(10, dtype=mx.float16)[0])
    batch.extend(BatchCache([0]))
    assert batch.keys.dtype == mx.float16
