"""The copies between SGLang's slots on a GPU and pages, beside the plain ones on a CPU.

`python -m pytest tests/engines/sglang` in SGLang's environment; on a machine without a GPU in
Triton's interpreter.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("triton")

from engines.cuda_sides import Late  # noqa: E402
from engines.sglang.cuda_pools import DEVICE, ON_GPU, filled, on_host, row, slots_of  # noqa: E402

from pdctl.engines.cuda import reading, writing  # noqa: E402
from pdctl.engines.sglang.cuda import Span  # noqa: E402
from pdctl.engines.sglang.cuda_proof import check  # noqa: E402
from pdctl.engines.sglang.pool import Part, SlotPool  # noqa: E402
from pdctl.handoff.device import Run  # noqa: E402
from pdctl.handoff.page import PATTERN, PageGeometry, Patterns  # noqa: E402
from pdctl.handoff.sink import Piece  # noqa: E402
from pdctl.topology.model import Dtype  # noqa: E402

PAGES = PageGeometry(layers=3, kv_heads=3, head_dim=16)
BLOCKS = 7
ORDER = [5, 2, 6, 0]
"""The blocks of a prompt."""
CASTS = [
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "float16"),
]
ROW = torch.stack([row(*ORDER), row(1, 3, 4, 0)])


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_BYTES", "GROUP_BYTES", "PIECE_PART_BYTES", "DEVICE_GROUP_BYTES"):
        monkeypatch.setattr(reading, name, 1)


def empty(slots: Any, pages: int = len(ORDER)) -> Patterns:
    raw = slots.page_memory(pages * PAGES.page_bytes)
    return raw.view(PATTERN).reshape(pages, *PAGES.shape)


def same(pool: Any, other: Any) -> bool:
    halves = [*pool.k_buffer, *pool.v_buffer], [*other.k_buffer, *other.v_buffer]
    return all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(*halves, strict=True))


@pytest.mark.parametrize(("engine", "page"), CASTS)
@pytest.mark.parametrize("last_slots", [0, 1, 64])
def test_blocks_become_the_pages_that_the_plain_copy_makes(
    engine: str, page: str, last_slots: int
) -> None:
    """R30: to the bit; what lies past the prompt, and before the first page, stays as it was."""
    pages = PageGeometry(layers=3, kv_heads=3, head_dim=16, dtype=Dtype(page))
    pool = filled(pages, BLOCKS, getattr(torch, engine))
    slots = slots_of(pool, pages, ROW)
    found, wanted = empty(slots), np.zeros((len(ORDER), *PAGES.shape), PATTERN)
    slots.read(ORDER[1:], 1, last_slots, found)
    SlotPool(on_host(pool), pages).read(ORDER[1:], 1, last_slots, wanted)
    assert np.array_equal(found, wanted)
    slots.close()


def test_pages_beyond_the_gpus_reach_are_filled_too() -> None:
    """Through memory that is kept for the next ones."""
    pool = filled(PAGES, BLOCKS, torch.float16)
    slots, plain = slots_of(pool, PAGES, ROW, reaches=False), SlotPool(on_host(pool), PAGES)
    for blocks in (ORDER, ORDER[2:]):
        found, wanted = (np.zeros((len(blocks), *PAGES.shape), PATTERN) for _ in range(2))
        slots.read(blocks, 0, 9, found)
        plain.read(blocks, 0, 9, wanted)
        assert np.array_equal(found, wanted)
    slots.close()


def test_a_step_brings_out_its_own_positions_by_the_table() -> None:
    """R26: of two prompts, one from the middle of a page on; layer by layer, in order."""
    pool = filled(PAGES, BLOCKS, torch.float16)
    slots = slots_of(pool, PAGES, ROW)
    first, second = empty(slots), empty(slots)
    landed: list[int] = []
    slots.begin_step([Span(0, 70, 200, first), Span(1, 0, 65, second)])
    for layer in slots.names:
        slots.gather(layer, lambda layer=layer: landed.append(layer))
    slots.close()
    assert landed == [0, 1, 2]
    plain = SlotPool(on_host(pool), PAGES)
    for found, blocks, start, stop in ((first, ORDER, 70, 200), (second, [1, 3, 4, 0], 0, 65)):
        wanted = np.zeros_like(found)
        plain.read(blocks, 0, 64, wanted)
        tokens = wanted.transpose(1, 2, 0, 3, 4, 5).reshape(3, 2, -1, 3, 16)
        tokens[:, :, :start] = tokens[:, :, stop:] = 0
        wanted = tokens.reshape(3, 2, len(ORDER), 64, 3, 16).transpose(2, 0, 1, 3, 4, 5)
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize(("engine", "page"), CASTS)
def test_pieces_are_placed_as_the_plain_copy_places_them(engine: str, page: str) -> None:
    """R26: pieces of other layers together; other blocks and slots stay as they were."""
    pages = PageGeometry(layers=3, kv_heads=3, head_dim=16, dtype=Dtype(page))
    pool = filled(pages, BLOCKS, getattr(torch, engine))
    plain = on_host(pool)
    rng = np.random.default_rng(5)
    slots, reference = slots_of(pool, pages, ROW), SlotPool(plain, pages)
    slots.fence()
    # the interpreter does not round as a GPU does
    whole = torch.from_numpy(rng.integers(-128, 128, (4, *PAGES.shape)).astype(np.float32))
    patterns = whole.to(getattr(torch, page)).view(torch.int16).numpy().view(PATTERN)
    for turn, block in enumerate(ORDER):
        count = 64 if turn < 3 else 7
        for first, last in ((0, 2), (2, 3)):
            piece = empty(slots, 1)[0, first:last]
            piece[:] = patterns[turn, first:last]
            slots.write(block, range(count), first, piece)
            reference.write(block, range(count), first, piece)
    slots.flush()
    assert same(pool, plain)
    slots.close()


def test_pieces_beyond_the_gpus_reach_are_placed_too() -> None:
    """R10: as late as a GPU copies, and though the memory of each is used again at once."""
    pool = filled(PAGES, BLOCKS, torch.float16)
    plain = on_host(pool)
    slots = slots_of(pool, PAGES, ROW, None if ON_GPU else Late(), reaches=False)
    reference = SlotPool(plain, PAGES)
    piece, rng = np.zeros(PAGES.shape, PATTERN), np.random.default_rng(5)
    for count in (5 * writing.BATCH_PIECES + 1, 3):
        for turn in range(count):
            piece[:] = rng.integers(0, 1 << 14, piece.shape)
            at = turn % BLOCKS, range(turn % 3, 64 - turn), 0, piece
            slots.write(*at)
            reference.write(*at)
        slots.flush()
        assert same(pool, plain)
    slots.close()


def test_pages_and_pieces_may_lie_in_the_devices_own_memory() -> None:
    """R56: out of one pool and into another, without an array over either."""
    source, target = (filled(PAGES, BLOCKS, torch.float16, seed) for seed in (1, 2))
    wanted = on_host(target)
    sending, receiving = slots_of(source, PAGES, ROW), slots_of(target, PAGES, ROW)
    memory = sending.device(3 * PAGES.page_bytes)
    run = Run(memory, 0, memory.size)
    sending.read([3], 0, 64, run)
    sending.begin_step([Span(0, 64, 128 + 11, run)])
    for layer in sending.names:
        sending.gather(layer, lambda: None)
    sending.close()
    parts = [
        Part([block], tokens, Piece(page, first, 1, run.part(at, PAGES.layer_bytes)))
        for page, (block, tokens) in enumerate([(4, 64), (1, 64), (0, 11)])
        for first in range(3)
        for at in [page * PAGES.page_bytes + first * PAGES.layer_bytes]
    ]
    over = receiving.write_from(parts)
    receiving.flush()
    assert over()
    for ours, theirs in zip(
        [*wanted.k_buffer, *wanted.v_buffer], [*source.k_buffer, *source.v_buffer], strict=True
    ):
        for to, of, count in ((4, 3, 64), (1, ORDER[1], 64), (0, ORDER[2], 11)):
            ours[to * 64 : to * 64 + count] = theirs[of * 64 : of * 64 + count].cpu()
    assert same(target, wanted)
    receiving.close()


@pytest.mark.parametrize("plain", [False, True])
def test_several_pages_of_one_piece_are_written_where_their_blocks_are(plain: bool) -> None:
    """R26, R30: of some layers, the last page in part; on a CPU alike."""
    source, target = (filled(PAGES, BLOCKS, torch.float16, seed) for seed in (1, 2))
    before = on_host(target)
    kind = SlotPool if plain and not ON_GPU else None
    slots = kind(target, PAGES) if kind else slots_of(target, PAGES, ROW)
    reading = SlotPool(on_host(source), PAGES)
    pages = np.zeros((3, *PAGES.shape), PATTERN)
    reading.read([3, 2, 6], 0, 64, pages)
    layers = np.ascontiguousarray(pages[:, 1:])
    memory = slots.device(layers.nbytes)
    memory.tensor.copy_(torch.from_numpy(layers.reshape(-1).view(np.uint8)))
    over = slots.write_from(
        [Part([4, 1, 0], 128 + 11, Piece(0, 1, 2, Run(memory, 0, memory.size), 3))]
    )
    slots.flush()
    assert over()
    wanted = SlotPool(before, PAGES)
    for block, count, page in ((4, 64, 0), (1, 64, 1), (0, 11, 2)):
        wanted.write(block, range(count), 1, pages[page, 1:])
    assert same(target, before)
    slots.close()


class Packed(SimpleNamespace):
    """A pool that stores as SGLang's does."""

    def set_kv_buffer(self, layer: Any, loc: Any, keys: Any, values: Any) -> None:
        self.k_buffer[layer.layer_id][loc], self.v_buffer[layer.layer_id][loc] = keys, values


class Swapped(Packed):
    def set_kv_buffer(self, layer: Any, loc: Any, keys: Any, values: Any) -> None:
        super().set_kv_buffer(layer, loc, values, keys)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_proof_passes(dtype: str) -> None:
    """What the pool stores is what pages hold, and what they write is what it stored; the pool
    itself stays as it was."""
    pool = Packed(**vars(filled(PAGES, BLOCKS, getattr(torch, dtype))))
    before = on_host(pool)
    check(slots_of(pool, PAGES, ROW), pool, PAGES)
    assert same(pool, before)


def test_the_proof_passes_with_sglangs_own_pool() -> None:
    """The operator that its attention backends call."""
    memory_pool = pytest.importorskip("sglang.srt.mem_cache.memory_pool")
    pool = memory_pool.MHATokenToKVPool(
        size=(BLOCKS - 1) * 64,
        page_size=64,
        dtype=torch.float16,
        head_num=PAGES.kv_heads,
        head_dim=PAGES.head_dim,
        layer_num=PAGES.layers,
        device=str(DEVICE),
        enable_memory_saver=False,
    )
    check(slots_of(pool, PAGES, ROW), pool, PAGES)


def test_the_proof_finds_swapped_halves() -> None:
    """U13: a pool that stores V where its shape says K is refused, by name."""
    pool = Swapped(**vars(filled(PAGES, BLOCKS, torch.float16)))
    with pytest.raises(ValueError, match=r"Swapped \(nhd\) packs its slots in an unknown way"):
        check(slots_of(pool, PAGES, ROW), pool, PAGES)
