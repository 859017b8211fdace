"""Blocks as vLLM keeps them on a GPU, of every order that is known, for tests.

For an environment that has torch and triton. Without a GPU the kernel runs in Triton's
interpreter, on tensors and page memory of the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")
ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from engines.cuda_sides import Inline  # noqa: E402

from pdctl.engines.vllm import cuda  # noqa: E402
from pdctl.engines.vllm.interface import Span  # noqa: E402
from pdctl.handoff.page import PATTERN, PageGeometry, Patterns  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PAGES = PageGeometry(layers=3, kv_heads=3, head_dim=64)
SEQUENCES = {16: 24, 32: 12, 64: 6, 128: 3}
"""Blocks of the engine, by their size."""


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
        side: Any = None,
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
        on_cpu = {
            "side": side or Inline(),
            "memory": lambda n: np.zeros(n, np.uint8),
            "lock": lambda memory: None,
        }
        locked = {} if ON_GPU else on_cpu
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


def expected(engine: Engine, blocks: Sequence[int], start: int, stop: int) -> Patterns:
    wanted = np.zeros((engine.pages.pages_for(stop), *engine.pages.shape), np.uint16)
    for layer in range(engine.pages.layers):
        held = engine.tokens(layer, blocks)
        for at in range(start, stop):
            wanted[at // 64, layer, :, at % 64] = held[:, at]
    return wanted
