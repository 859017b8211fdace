"""The copies between vLLM's blocks on a GPU and pages.

Run by an environment that has torch and triton. Without a GPU the kernel runs in Triton's
interpreter, on tensors and page memory of the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")
ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from pdctl.engines.vllm import cuda, cuda_copies  # noqa: E402
from pdctl.engines.vllm.cuda_layout import layout_of, like  # noqa: E402
from pdctl.engines.vllm.cuda_proof import check  # noqa: E402
from pdctl.engines.vllm.interface import Span  # noqa: E402
from pdctl.handoff.page import PATTERN, PageGeometry, Patterns  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PAGES = PageGeometry(layers=3, kv_heads=3, head_dim=64)
SEQUENCES = {16: 24, 32: 12, 64: 6, 128: 3}
"""Blocks of the engine, by their size."""


class Inline:
    """A side stream whose work is done when it is given."""

    def after_model(self, work: Callable[[], None]) -> Inline:
        return self.run(work)

    def run(self, work: Callable[[], None]) -> Inline:
        work()
        return self

    def synchronize(self) -> None:
        return

    def hold_side(self) -> None:
        return

    def hold_model(self, mark: Inline) -> None:
        return


class Backend:
    """An attention backend: how it names and orders its dimensions, and how it writes."""

    def __init__(self, form: str, order: str) -> None:
        self.form, self.order = form, order

    def get_name(self) -> str:
        return f"TEST_{self.form}"

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return {
            "packed": (num_blocks, num_kv_heads, block_size, 2 * head_size),
            "halves_first": (2, num_blocks, block_size, num_kv_heads, head_size),
            "halves_second": (num_blocks, 2, block_size, num_kv_heads, head_size),
            "flat": (num_blocks, block_size, 2 * num_kv_heads * head_size),
        }[self.form]

    def memory(self, blocks: int, block: int, pages: PageGeometry, dtype: Any) -> Any:
        shape = self.get_kv_cache_shape(blocks, block, pages.kv_heads, pages.head_dim)
        made = torch.zeros(shape, dtype=dtype, device=DEVICE)
        heads, slots = {"packed": (1, 2)}.get(self.form, (3, 2))
        hnd = slots > heads
        if (self.order == "HND") == hnd:
            return made
        lying = made.transpose(heads, slots).contiguous()
        return lying.transpose(heads, slots)

    def halves(self, memory: Any) -> Any:
        """K and V `[blocks, block, heads, dim]`, as views."""
        if self.form == "packed":
            return memory.transpose(1, 2).chunk(2, dim=-1)
        return memory.unbind(0 if self.form == "halves_first" else 1)

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        for half, source in zip(self.halves(kv_cache), (key, value), strict=True):
            block = half.shape[1]
            half[slot_mapping // block, slot_mapping % block] = source


FORMS = [
    ("packed", "NHD"),
    ("packed", "HND"),
    ("halves_first", "NHD"),
    ("halves_first", "HND"),
    ("halves_second", "NHD"),
]

FORMS_AND_SIZES = [
    *(("packed", "NHD", size) for size in SEQUENCES),
    *((form, order, 32) for form, order in FORMS[1:]),
]


class Engine:
    """Blocks of three layers, filled with distinct numbers."""

    def __init__(
        self,
        form: str = "packed",
        order: str = "NHD",
        *,
        size: int = 64,
        kernel_size: int | None = None,
        pages: PageGeometry = PAGES,
        dtype: Any = None,
    ) -> None:
        self.backend = Backend(form, order)
        self.size, self.pages = size, pages
        dtype = dtype or torch.float16
        small = kernel_size or size
        count = SEQUENCES[size] * size // small
        self.caches = {
            f"model.layers.{layer}.self_attn.attn": self.backend.memory(count, small, pages, dtype)
            for layer in range(pages.layers)
        }
        rng = np.random.default_rng(3)
        for memory in self.caches.values():
            numbers = rng.integers(-2000, 2000, tuple(memory.shape)).astype(np.float32)
            memory.copy_(torch.from_numpy(numbers))
        locked = {} if ON_GPU else {"side": Inline(), "memory": lambda n: np.zeros(n, np.uint8)}
        self.blocks = cuda.CudaBlocks(self.caches, pages, self.backend, size, **locked)

    def tokens(self, layer: int, blocks: Sequence[int]) -> np.ndarray:
        """What that layer holds of a sequence: `[2, tokens, heads, dim]`, bit patterns."""
        memory = self.blocks.layers[layer]
        halves = torch.stack(list(self.backend.halves(memory))).to(torch.float16)
        flat = halves.cpu().flatten(1, 2)
        at = torch.tensor([b * self.size + slot for b in blocks for slot in range(self.size)])
        return flat[:, at].view(torch.int16).numpy().view(np.uint16)

    def empty_pages(self, tokens: int) -> Patterns:
        count = self.pages.pages_for(tokens)
        raw = self.blocks.page_memory(count * self.pages.page_bytes)
        return raw.view(PATTERN).reshape(count, *self.pages.shape)

    def read(self, *spans: Span) -> list[int]:
        """One step; the layers as they landed."""
        landed: list[int] = []
        self.blocks.begin_step(spans)
        for layer in range(self.pages.layers):
            self.blocks.gather(layer, lambda layer=layer: landed.append(layer))
        self.blocks.close()
        return landed


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "GROUP_BYTES", 1)
    monkeypatch.setattr(cuda, "PIECE_PART_BYTES", 1)


def expected(engine: Engine, blocks: Sequence[int], start: int, stop: int) -> Patterns:
    wanted = np.zeros((engine.pages.pages_for(stop), *engine.pages.shape), np.uint16)
    for layer in range(engine.pages.layers):
        held = engine.tokens(layer, blocks)
        for at in range(start, stop):
            wanted[at // 64, layer, :, at % 64] = held[:, at]
    return wanted


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


def test_layers_land_in_groups_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small prompts' layers leave together, with one launch, and all of them are told."""
    monkeypatch.setattr(cuda, "GROUP_BYTES", 1 << 20)
    engine = Engine()
    launched: list[int] = []
    to_pages = cuda_copies.Copies.to_pages

    def counted(self: Any, bases: Any, table: Any, first: int) -> None:
        launched.append(len(bases))
        to_pages(self, bases, table, first)

    monkeypatch.setattr(cuda_copies.Copies, "to_pages", counted)
    pages = engine.empty_pages(65)
    assert engine.read(Span([1, 2], 0, 65, pages)) == [0, 1, 2]
    assert launched == [3]
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


@pytest.mark.parametrize(("form", "order"), FORMS)
def test_the_proof_passes(form: str, order: str) -> None:
    """What the backend writes is what pages hold, and what they write is what it wrote."""
    engine = Engine(form, order, size=32)
    check(engine.blocks, attention(engine.backend, engine.backend), engine.pages)


def test_the_proof_finds_swapped_halves() -> None:
    """A backend that writes K where its shape says V is refused, by name."""
    engine = Engine("halves_first", "NHD", size=32)

    class Swapped(Backend):
        def halves(self, memory: Any) -> Any:
            return tuple(reversed(super().halves(memory)))

    with pytest.raises(ValueError, match=r"TEST_halves_first NHD.* packed in an unknown way"):
        check(engine.blocks, attention(engine.backend, Swapped("halves_first", "NHD")), PAGES)


def attention(backend: Backend, impl: Backend) -> Any:
    return type("Attention", (), {"attn_backend": backend, "impl": impl})()


def test_an_unknown_shape_is_refused_by_name() -> None:
    """A backend with dimensions that pdctl does not know is no guess."""
    with pytest.raises(ValueError, match=r"vLLM's TEST_flat keeps KV as \(10007, 48, 2288\)"):
        Engine("flat")


def test_memory_that_is_not_as_the_backend_says_is_refused() -> None:
    """Four heads and blocks of four would look alike: the backend's own shape decides."""
    backend = Backend("packed", "NHD")
    pages = PageGeometry(layers=1, kv_heads=16, head_dim=64)
    fits = backend.memory(8, 16, pages, torch.float16)
    assert layout_of(backend, [fits], pages, 16).name == "TEST_packed NHD packed"
    other = PageGeometry(layers=1, kv_heads=8, head_dim=64)
    with pytest.raises(ValueError, match=r"TEST_packed registered \(8, 16, 16, 128\)"):
        layout_of(backend, [fits], other, 16)


@pytest.mark.parametrize(("form", "order"), FORMS)
def test_a_twin_lies_as_its_model_does(form: str, order: str) -> None:
    """Memory for the proof has its dimensions in the same order."""
    backend = Backend(form, order)
    memory = backend.memory(8, 16, PAGES, torch.float16)
    twin = like(memory, backend, 3)
    ours, theirs = (layout_of(backend, [m] * 3, PAGES, 16) for m in (twin, memory))
    assert (ours.name, ours.head_stride, ours.slot_stride) == (
        theirs.name,
        theirs.head_stride,
        theirs.slot_stride,
    )
