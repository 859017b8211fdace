"""The copies between SGLang's slots and pages. Run by an environment that has torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdctl.handoff.page import PATTERN, PageGeometry, Patterns
from pdctl.topology.model import Dtype

torch: Any = pytest.importorskip("torch")

from pdctl.engines.sglang.pool import SlotPool  # noqa: E402

LAYERS, HEADS, DIM, BLOCKS = 3, 2, 8, 9
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def geometry(dtype: str = "float16") -> PageGeometry:
    return PageGeometry(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype=Dtype(dtype))


def memory(dtype: Any, *, slots: int = BLOCKS * 64) -> SimpleNamespace:
    """Whole numbers that every 16-bit type holds, none twice within a layer's first slots."""
    generator = torch.Generator().manual_seed(1)
    shape = (slots, HEADS, DIM)

    def layer() -> Any:
        return torch.randint(-120, 120, shape, generator=generator).to(dtype)

    keys, values = [layer() for _ in range(LAYERS)], [layer() for _ in range(LAYERS)]
    return SimpleNamespace(k_buffer=keys, v_buffer=values, page_size=64, kv_cache_layout="nhd")


def as_numbers(pages: Patterns, dtype: str) -> Any:
    return torch.from_numpy(pages.view(np.int16)).view(DTYPES[dtype]).float()


def tokens_of(pool: SimpleNamespace, block: int, slots: slice) -> Any:
    """`[layers, 2, slots, heads, dim]` as SGLang holds them."""
    at = slice(block * 64 + slots.start, block * 64 + slots.stop)
    pairs = zip(pool.k_buffer, pool.v_buffer, strict=True)
    return torch.stack([torch.stack([key[at], value[at]]) for key, value in pairs]).float()


@pytest.mark.parametrize("engine", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("pages", ["float16", "bfloat16"])
def test_blocks_become_pages_in_the_order_of_the_prompt(engine: str, pages: str) -> None:
    """R30: of the last block its first slots alone; what lies past them stays zero."""
    pool = memory(DTYPES[engine])
    into = np.zeros((4, *geometry(pages).shape), PATTERN)
    SlotPool(pool, geometry(pages)).read([5, 2, 7], 1, 10, into)
    found = as_numbers(into, pages)
    for page, block in ((1, 5), (2, 2)):
        assert torch.equal(found[page], tokens_of(pool, block, slice(0, 64)))
    assert torch.equal(found[3][:, :, :10], tokens_of(pool, 7, slice(0, 10)))
    assert not found[0].any()
    assert not found[3][:, :, 10:].any()


def test_a_last_block_may_hold_nothing_yet() -> None:
    """R25: n % 64 == 1, while the prompt's last position is still to be copied."""
    pool = memory(torch.float32)
    into = np.zeros((2, *geometry().shape), PATTERN)
    SlotPool(pool, geometry()).read([3, 4], 0, 0, into)
    assert torch.equal(as_numbers(into, "float16")[0], tokens_of(pool, 3, slice(0, 64)))
    assert not into[1].any()


@pytest.mark.parametrize("engine", ["float16", "float32"])
def test_a_piece_is_placed_in_its_block_and_nowhere_else(engine: str) -> None:
    """R26: other blocks, other layers and the slots past the prompt's end are as they were."""
    pool, pages = memory(DTYPES[engine]), geometry()
    before = [layer.clone() for layer in (*pool.k_buffer, *pool.v_buffer)]
    numbers = torch.arange(2 * 2 * 64 * HEADS * DIM).reshape(2, 2, 64, HEADS, DIM) % 1000
    piece = numbers.half().view(torch.int16).numpy().view(PATTERN)
    piece.flags.writeable = False
    SlotPool(pool, pages).write(6, range(20), 1, piece)
    assert torch.equal(tokens_of(pool, 6, slice(0, 20))[1:], numbers[:, :, :20].float())
    for layer, old in zip((*pool.k_buffer, *pool.v_buffer), before, strict=True):
        changed = (layer != old).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= set(range(6 * 64, 6 * 64 + 20))
    assert torch.equal(pool.k_buffer[0], before[0])


def test_pages_of_one_pool_are_read_back_from_another_bit_by_bit() -> None:
    """R56: what prefill reads is what decode has, for every layer and both halves."""
    sent, received = SlotPool(memory(torch.float16), geometry()), memory(torch.float16)
    pages = np.zeros((2, *geometry().shape), PATTERN)
    sent.read([1, 8], 0, 64, pages)
    place = SlotPool(received, geometry())
    for page, block in ((0, 4), (1, 2)):
        place.write(block, range(64), 0, pages[page])
    again = np.zeros_like(pages)
    place.read([4, 2], 0, 64, again)
    assert np.array_equal(again, pages)


@pytest.mark.parametrize(
    "wrong",
    [
        {"page_size": 1},
        {"kv_cache_layout": "hnd"},
        {"k_buffer": [torch.zeros(64, HEADS, DIM)]},
        {"v_buffer": [torch.zeros(64, HEADS, DIM + 1)] * LAYERS},
        {"k_buffer": [torch.zeros(64, HEADS, DIM, dtype=torch.uint8)] * LAYERS},
    ],
)
def test_memory_laid_out_otherwise_is_refused(wrong: dict[str, Any]) -> None:
    """U13: before anything is served."""
    with pytest.raises(ValueError, match=r"layer|blocks"):
        SlotPool(SimpleNamespace(**{**vars(memory(torch.float16)), **wrong}), geometry())
