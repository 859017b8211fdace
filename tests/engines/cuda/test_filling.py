"""Whole pages into blocks on a GPU. For an environment that has torch and triton; without a GPU the
kernel runs in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from engines.cuda_sides import Late
from engines.vllm.cuda_engine import DEVICE, PAGES, Engine

from pdctl.engines.cuda import filling
from pdctl.engines.cuda.filling import address_of
from pdctl.engines.cuda.kernel import Copies
from pdctl.handoff.page import PATTERN, Patterns
from pdctl.handoff.store import memory

SLOTS = [7, 3, 4, 5, 1, 0]
"""Of the prompt's pages, in memory that another process made."""
BLOCKS = [4, 0, 3, 1, 5, 2]
STOP = 5 * 64 + 7


class Shared:
    """Such memory; `locked` pages of it are the GPU's to read."""

    def __init__(self, locked: int) -> None:
        raw = np.random.default_rng(1).integers(-2000, 2000, (8, *PAGES.shape))
        self.memory: Patterns = raw.astype(np.float16).view(PATTERN)
        self.memory.flags.writeable = False
        self.pages = [self.memory[slot] for slot in SLOTS]
        self.stop = address_of(self.memory) + locked * PAGES.page_bytes
        self.copied: list[int] = []

    def reaches(self, copies: Copies, address: int, size: int) -> bool:
        near = address >= address_of(self.memory) and address + size <= self.stop
        if not near:
            self.copied.append(size // PAGES.page_bytes)
        return near


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU knows what it reaches")
@pytest.mark.parametrize(
    ("start", "part", "locked", "copied"),
    [
        (0, 2, 0, [1, 1, 2, 1, 1]),
        (0, 6, 0, [1, 3, 1, 1]),
        (100, 6, 6, []),
        (0, 6, 6, [1]),
        (100, 1, 0, [1] * 5),
    ],
)
def test_pages_stand_in_the_blocks_wherever_they_lay(
    start: int, part: int, locked: int, copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R10: as late as a GPU copies, no buffer is filled again before it was read; neighbours are
    one copy, and what the GPU reaches is none."""
    shared = Shared(locked)
    monkeypatch.setattr(filling, "PART_BYTES", part * PAGES.page_bytes)
    monkeypatch.setattr(Copies, "reaches_at", lambda *given: shared.reaches(*given))
    engine = Engine(size=64, side=Late())
    before = [engine.tokens(layer, BLOCKS) for layer in range(PAGES.layers)]
    engine.blocks.write_pages(BLOCKS, start, STOP, shared.pages)
    whole = np.concatenate(shared.pages, axis=2)
    for layer, held in enumerate(before):
        found = engine.tokens(layer, BLOCKS)
        assert np.array_equal(found[:, start:STOP], whole[layer, :, start:STOP])
        assert np.array_equal(found[:, :start], held[:, :start])
        assert np.array_equal(found[:, STOP:], held[:, STOP:])
    assert shared.copied == copied
    engine.blocks.close()


def test_a_copy_that_fails_leaves_none_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """R34: the pages are another's as soon as it has raised."""
    side, shared = Late(), Shared(8)
    monkeypatch.setattr(filling, "PART_BYTES", PAGES.page_bytes)
    engine = Engine(size=64, side=side)
    pages: list[Any] = [*shared.pages[:2], None]
    with pytest.raises(AttributeError):
        engine.blocks.write_pages(BLOCKS, 0, 192, pages)
    assert side.waiting == []
    engine.blocks.close()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a driver that locks memory")
def test_a_gpu_reads_a_stores_memory_where_it_lies() -> None:
    """Six slots are locked, two are not; they are unlocked with the arrays that were locked."""
    descriptor = memory.create(8, PAGES)
    store = memory.PageMemory(descriptor, 8, PAGES)
    for slot in range(8):
        assert memory.back(descriptor, slot, PAGES.page_bytes)
        store.page(slot, writable=True)[...] = slot + 1
    engine = Engine(size=64)
    locked = [store.run(0, 4), store.run(4, 6)]
    for each in locked:
        engine.blocks.lock(each)
    pages = [store.page(slot) for slot in SLOTS]
    reached = [engine.blocks._copies.reaches_at(address_of(p), p.nbytes) for p in pages]
    assert reached == [slot < 6 for slot in SLOTS]
    engine.blocks.write_pages(BLOCKS, 0, STOP, pages)
    for layer in range(PAGES.layers):
        found = engine.tokens(layer, BLOCKS)
        for at, slot in enumerate(SLOTS):
            assert np.all(found[:, at * 64 : min(at * 64 + 64, STOP)] == slot + 1)
    del each
    locked.clear()
    assert not engine.blocks._copies.reaches_at(address_of(pages[2]), PAGES.page_bytes)
    engine.blocks.close()
    os.close(descriptor)
