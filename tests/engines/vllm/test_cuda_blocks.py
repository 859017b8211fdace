"""The copies between vLLM's blocks on a GPU and pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("triton")

from engines.vllm.cuda_engine import (  # noqa: E402
    FORMS_AND_SIZES,
    PAGES,
    SEQUENCES,
    Engine,
    expected,
)

from pdctl.engines.cuda import reading  # noqa: E402
from pdctl.engines.cuda.kernel import Copies  # noqa: E402
from pdctl.engines.vllm.interface import Span  # noqa: E402


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_BYTES", "GROUP_BYTES", "PIECE_PART_BYTES"):
        monkeypatch.setattr(reading, name, 1)


@pytest.mark.parametrize(("form", "order", "size"), FORMS_AND_SIZES)
@pytest.mark.parametrize("tokens", [65, 129, 193])
def test_pages_hold_what_the_blocks_do(form: str, order: str, size: int, tokens: int) -> None:
    """R25: pages of 65, 129 and 193 tokens, out of blocks of any size and order, to the bit; the
    tail of the last page stays zero."""
    engine = Engine(form, order, size=size)
    needed = -(-tokens // size)
    blocks = list(range(SEQUENCES[size]))[::-1][:needed]
    pages = engine.empty_pages(tokens)
    assert engine.read(Span(blocks, 0, tokens, pages)) == [0, 1, 2]
    assert np.array_equal(pages, expected(engine, blocks, 0, tokens))


@pytest.mark.parametrize(("form", "order", "size"), FORMS_AND_SIZES)
@pytest.mark.parametrize("tokens", [65, 129, 193])
@pytest.mark.parametrize("extra", [0, 1])
def test_blocks_hold_what_the_pages_did(
    form: str, order: str, size: int, tokens: int, extra: int
) -> None:
    """R26: 65, 129 and 193 tokens into as many blocks as they need, and into one more, which
    stays as it was, as do all others."""
    engine = Engine(form, order, size=size)
    needed = -(-tokens // size)
    blocks = list(range(SEQUENCES[size]))[::-1][: needed + extra]
    before = {layer: engine.tokens(layer, range(SEQUENCES[size])) for layer in range(3)}
    pages = engine.empty_pages(tokens)
    pages[:] = np.random.default_rng(5).integers(0, 1 << 15, pages.shape)
    engine.blocks.fence()
    for page in range(len(pages)):
        for first, last in ((0, 2), (2, 3)):
            stop = min((page + 1) * 64, tokens)
            engine.blocks.write(blocks, page * 64, stop, first, pages[page, first:last])
    engine.blocks.flush()
    for layer in range(3):
        held = engine.tokens(layer, blocks)
        wanted = pages[:, layer].transpose(1, 0, 2, 3, 4).reshape(2, -1, 3, 64)[:, :tokens]
        assert np.array_equal(held[:, :tokens], wanted)
        assert untouched(engine, layer, blocks, tokens, before[layer])


def untouched(
    engine: Engine, layer: int, blocks: Sequence[int], tokens: int, before: np.ndarray
) -> bool:
    size = engine.size
    written = {blocks[at // size] * size + at % size for at in range(tokens)}
    after = engine.tokens(layer, range(SEQUENCES[size]))
    others = [at for at in range(after.shape[1]) if at not in written]
    return np.array_equal(after[:, others], before[:, others])


def test_a_step_copies_its_own_positions_alone() -> None:
    """R26: of two prompts in one step, one in the middle of a page, nothing else is written."""
    engine = Engine(size=16)
    first, second = engine.empty_pages(150), engine.empty_pages(70)
    left, right = [3, 1, 4, 15, 9, 2, 6, 5, 8, 7], [10, 11, 12, 13, 14]
    engine.read(Span(left, 70, 150, first), Span(right, 0, 70, second))
    assert np.array_equal(first, expected(engine, left, 70, 150))
    assert np.array_equal(second, expected(engine, right, 0, 70))


def test_a_write_begins_where_the_cache_ends() -> None:
    """A page whose first positions are held already is written beyond them only."""
    engine = Engine(size=16)
    before = engine.tokens(1, range(24))
    pages = engine.empty_pages(64)
    pages[:] = 7
    engine.blocks.write([5, 6, 7, 8], 20, 63, 1, pages[0, 1:2])
    engine.blocks.flush()
    after = engine.tokens(1, range(24))
    changed = np.flatnonzero((after != before).any(axis=(0, 2, 3)))
    assert changed.tolist() == list(range(5 * 16 + 20, 5 * 16 + 63))


@pytest.mark.parametrize(
    ("first", "group", "part", "launched"),
    [
        (1 << 20, 1 << 20, 1, [3]),
        (1, 1 << 20, 1, [1, 2]),
        (1, 1, PAGES.layer_bytes + 1, [1, 2]),
        (1, 1, 1, [1, 1, 1]),
    ],
)
def test_layers_land_in_groups_and_in_order(
    first: int, group: int, part: int, launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers leave together until they are worth a launch and fill their pieces; the first leave
    early, and of those that leave together the last is told."""
    monkeypatch.setattr(reading, "FIRST_BYTES", first)
    monkeypatch.setattr(reading, "GROUP_BYTES", group)
    monkeypatch.setattr(reading, "PIECE_PART_BYTES", part)
    engine = Engine()
    seen: list[int] = []
    to_pages = Copies.to_pages

    def counted(self: Copies, tokens: Any, layers: range, **more: Any) -> None:
        seen.append(len(layers))
        to_pages(self, tokens, layers, **more)

    monkeypatch.setattr(Copies, "to_pages", counted)
    pages = engine.empty_pages(65)
    told = np.cumsum(launched) - 1
    assert engine.read(Span([1, 2], 0, 65, pages)) == told.tolist()
    assert seen == launched
    assert np.array_equal(pages, expected(engine, [1, 2], 0, 65))


def test_kernel_blocks_are_smaller_than_the_engines() -> None:
    """vLLM's ids count blocks of 128 where its backend's tensors have blocks of 32."""
    engine = Engine(size=128, kernel_size=32)
    pages = engine.empty_pages(193)
    engine.read(Span([2, 0], 0, 193, pages))
    assert np.array_equal(pages, expected(engine, [2, 0], 0, 193))


def test_a_cast_rounds_as_the_engine_does() -> None:
    """Blocks of float32 leave as float16 pages and come back as what these hold."""
    engine = Engine(dtype=torch.float32)
    memory = engine.blocks.layers[0]
    memory.copy_(torch.rand(memory.shape))
    pages = engine.empty_pages(65)
    engine.read(Span([1, 2], 0, 65, pages))
    assert np.array_equal(pages, expected(engine, [1, 2], 0, 65))
    again = Engine(dtype=torch.float32)
    again.blocks.write([1, 2], 0, 64, 0, pages[0])
    again.blocks.flush()
    assert np.array_equal(again.tokens(0, [1]), engine.tokens(0, [1]))
