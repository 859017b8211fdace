"""SGLang's pool as it lies on a GPU, for an environment that has torch and triton.

Without a GPU the kernel runs in Triton's interpreter, on memory of the CPU.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")
ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from engines.cuda_sides import Inline  # noqa: E402

from pdctl.engines.cuda.stream import SideStream  # noqa: E402
from pdctl.engines.sglang.cuda import CudaSlots  # noqa: E402
from pdctl.handoff.page import PageGeometry  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def slots_of(
    pool: Any, pages: PageGeometry, table: Any, side: Any = None, *, reaches: bool = True
) -> CudaSlots:
    """Args:
    reaches: the kernel can look into any memory of the host; without a GPU.
    """
    if ON_GPU:
        return CudaSlots(pool, pages, table, side or SideStream(DEVICE))
    slots = CudaSlots(
        pool,
        pages,
        table,
        side or Inline(),
        memory=lambda size: np.zeros(size, np.uint8),
        lock=lambda memory: None,
    )
    slots._copies.reaches = lambda pages: reaches  # type: ignore[method-assign]
    return slots


def filled(pages: PageGeometry, blocks: int, dtype: Any, seed: int = 3) -> SimpleNamespace:
    """Whole numbers that every 16-bit type holds."""
    rng = np.random.default_rng(seed)

    def layer() -> Any:
        shape = (blocks * 64, pages.kv_heads, pages.head_dim)
        numbers = rng.integers(-128, 128, shape).astype(np.float32)
        return torch.from_numpy(numbers).to(DEVICE, dtype)

    keys, values = ([layer() for _ in range(pages.layers)] for _ in range(2))
    return SimpleNamespace(k_buffer=keys, v_buffer=values, page_size=64)


def on_host(pool: SimpleNamespace) -> SimpleNamespace:
    """A copy of it, in memory of the CPU."""
    halves = {
        name: [layer.cpu().clone() for layer in getattr(pool, name)]
        for name in ("k_buffer", "v_buffer")
    }
    return SimpleNamespace(page_size=64, **halves)


def row(*blocks: int) -> Any:
    """The slots of a request that has these blocks, as a row of SGLang's table."""
    slots = torch.tensor([block * 64 + slot for block in blocks for slot in range(64)])
    return slots.to(DEVICE, torch.int32)
