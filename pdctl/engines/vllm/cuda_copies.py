"""One Triton kernel that copies tokens of several layers between vLLM's blocks and pages.

Pages are page-locked host memory, which the GPU reads and writes in place over the bus: one
launch gathers, casts where the dtypes differ, and lands. Few programs do it, so that a model's
kernels keep the card meanwhile.

    bases       [layers] int64: addresses of the layers' memory
    table       [2, rows] int64: each token's offset in a layer's memory (elements), and the
                address of its K in the first layer that its page memory has
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pdctl.engines.vllm.cuda_layout import Layout
from pdctl.handoff.page import PageGeometry

PROGRAMS = 32
"""At most, per launch, over all its layers: 17 to 36 GB/s into host memory on an H200, by the width
of a token; four times as many give a third more."""
WORD = torch.int64
"""Where nothing is cast, what is moved at once: four elements of 16 bits."""

_TRITON_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.int64: tl.int64,
}


@triton.jit(do_not_specialize=["rows", "first", "first_on_page"])  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    bases,
    table,
    rows,
    first,
    first_on_page,
    half_stride,
    head_stride,
    PAGE_HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    ENGINE: tl.constexpr,
    PAGE: tl.constexpr,
    TO_PAGES: tl.constexpr,
):
    layer = tl.program_id(1)
    memory = tl.load(bases + first + layer).to(tl.pointer_type(ENGINE))
    lane = tl.arange(0, LANES)[None, :]
    within = lane // DIM * head_stride + lane % DIM
    page_layer = (first_on_page + layer) * 2 * PAGE_HALF
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        valid = row < rows
        place = tl.load(table + row, mask=valid, other=0)[:, None]
        address = tl.load(table + rows + row, mask=valid, other=0)[:, None]
        page = address.to(tl.pointer_type(PAGE)) + page_layer + lane
        mask = valid[:, None] & (lane < WIDTH)
        for half in tl.static_range(2):
            engine = memory + (place + half * half_stride) + within
            if TO_PAGES:
                got = tl.load(engine, mask=mask)
                tl.store(page + half * PAGE_HALF, got.to(PAGE), mask=mask)
            else:
                got = tl.load(page + half * PAGE_HALF, mask=mask)
                tl.store(engine, got.to(ENGINE), mask=mask)


class Copies:
    """The kernel, for one engine's memory. Launches go to the caller's current stream.

    Args:
        dtype: of the engine's memory; `page_dtype` of the pages.
    """

    def __init__(
        self, layout: Layout, pages: PageGeometry, dtype: torch.dtype, page_dtype: torch.dtype
    ) -> None:
        strides = (layout.half_stride, layout.head_stride)
        whole = (pages.head_dim, layout.block_stride, layout.slot_stride, *strides)
        self._words = 4 if dtype == page_dtype and not any(n % 4 for n in whole) else 1
        moved = (WORD, WORD) if self._words > 1 else (dtype, page_dtype)
        width, dim = pages.kv_heads * pages.head_dim // self._words, pages.head_dim // self._words
        lanes = triton.next_power_of_2(width)
        self._rows = max(1, 2048 // lanes)
        self._strides = tuple(n // self._words for n in strides)
        self._constants = {
            "PAGE_HALF": pages.page_tokens * width,
            "WIDTH": width,
            "DIM": dim,
            "LANES": lanes,
            "ROWS": self._rows,
            "ENGINE": _TRITON_TYPES[moved[0]],
            "PAGE": _TRITON_TYPES[moved[1]],
        }

    def places(self, offsets: Any) -> Any:
        """Offsets in elements, as the table wants them."""
        return offsets // self._words

    def to_pages(self, bases: torch.Tensor, table: torch.Tensor, layers: range) -> None:
        """Those layers of the table's tokens, into pages that have all layers."""
        self._launch(bases, table, layers, layers.start, to_pages=True)

    def from_pages(self, bases: torch.Tensor, table: torch.Tensor, layers: range) -> None:
        """Those layers of the table's tokens, from page memory that begins with them."""
        self._launch(bases, table, layers, 0, to_pages=False)

    def _launch(
        self,
        bases: torch.Tensor,
        table: torch.Tensor,
        layers: range,
        first_on_page: int,
        *,
        to_pages: bool,
    ) -> None:
        rows, count = table.shape[1], len(layers)
        programs = min(-(-rows // self._rows), max(1, PROGRAMS // count))
        _copy[(programs, count)](
            *(bases, table, rows, layers.start, first_on_page),
            *self._strides,
            **self._constants,
            TO_PAGES=to_pages,
        )
