"""One Triton kernel that copies tokens of several layers between an engine's KV memory and pages.

Pages are page-locked host memory, which the GPU reads and writes in place over the bus: one
launch gathers, casts where the dtypes differ, and lands. Few programs do it, so that a model's
kernels keep the card meanwhile.

    bases       [2, layers] int64: addresses of the layers' K, then of their V
    places      [rows] int64: each token's offset in a layer's memory (elements, or words)
    addresses   [rows] int64: of each token's K in the first layer that its page memory has
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from pdctl.handoff.page import PageGeometry, Patterns

PROGRAMS = 32
"""At most, per launch, over all its layers: 17 to 36 GB/s into host memory on an H200, by the width
of a token; four times as many give a third more."""
DEVICE_PROGRAMS = 4 * PROGRAMS
"""Where pages lie in the device's own memory too: a copy is over the sooner, and none waits for the
bus."""
WORD = torch.int64
"""Where nothing is cast, what is moved at once: four elements of 16 bits."""

_TRITON_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.int64: tl.int64,
}


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["places", "addresses", "rows", "layers", "first", "first_on_page"]
)
def _copy(  # type: ignore[no-untyped-def]
    bases,
    places,
    addresses,
    rows,
    layers,
    first,
    first_on_page,
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
    keys = tl.load(bases + first + layer).to(tl.pointer_type(ENGINE))
    values = tl.load(bases + layers + first + layer).to(tl.pointer_type(ENGINE))
    lane = tl.arange(0, LANES)[None, :]
    within = lane // DIM * head_stride + lane % DIM
    page_layer = (first_on_page + layer) * 2 * PAGE_HALF
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        valid = row < rows
        place = tl.load(places + row, mask=valid, other=0)[:, None]
        address = tl.load(addresses + row, mask=valid, other=0)[:, None]
        page = address.to(tl.pointer_type(PAGE)) + page_layer + lane
        mask = valid[:, None] & (lane < WIDTH)
        for half in tl.static_range(2):
            engine = (keys if half == 0 else values) + place + within
            if TO_PAGES:
                got = tl.load(engine, mask=mask)
                tl.store(page + half * PAGE_HALF, got.to(PAGE), mask=mask)
            else:
                got = tl.load(page + half * PAGE_HALF, mask=mask)
                tl.store(engine, got.to(ENGINE), mask=mask)


class Tokens(NamedTuple):
    """Which tokens a launch copies; the GPU reads both until it is over."""

    places: torch.Tensor
    addresses: torch.Tensor


class Copies:
    """The kernel, for one engine's memory. Launches go to the caller's current stream.

    Args:
        bases: addresses of K and of V, for each layer.
        device: where the memory lies.
        dtype: of the engine's memory; `page_dtype` of the pages.
        head_stride: from a token's head to its next, in elements; a head's are adjacent.
        steps: all other distances between two tokens, or a token's two halves, in elements.
    """

    def __init__(
        self,
        bases: Sequence[tuple[int, int]],
        device: torch.device,
        pages: PageGeometry,
        *,
        dtype: torch.dtype,
        page_dtype: torch.dtype,
        head_stride: int,
        steps: Sequence[int],
    ) -> None:
        self._bases = torch.tensor(bases, dtype=torch.int64).T.contiguous().to(device)
        self.on_gpu = device.type != "cpu"
        self._pages = pages
        whole = (pages.head_dim, head_stride, *steps)
        self._words = 4 if dtype == page_dtype and not any(n % 4 for n in whole) else 1
        moved = (WORD, WORD) if self._words > 1 else (dtype, page_dtype)
        width, dim = pages.kv_heads * pages.head_dim // self._words, pages.head_dim // self._words
        lanes = triton.next_power_of_2(width)
        self._rows = max(1, 2048 // lanes)
        self._head_stride = head_stride // self._words
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
        """Offsets in elements, as `Tokens` wants them: an array or a tensor."""
        return offsets // self._words

    def tokens(self, rows: NDArray[np.int64]) -> Tokens:
        """Of `[2, tokens]`, places and addresses."""
        return Tokens(*self.near(rows))

    def near(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        """Read by the GPU where it lies: a copy to the device would wait for the model."""
        found = torch.from_numpy(numbers)
        return found.pin_memory() if self.on_gpu else found

    def reaches(self, pages: Patterns) -> bool:
        """Whether the kernel can read and write them where they lie."""
        return not self.on_gpu or torch.from_numpy(pages.view(np.int16)).is_pinned()

    def reaches_at(self, address: int, size: int) -> bool:
        """The same of memory by its address, whose first and last bytes tell of all of it."""
        if not self.on_gpu:
            return True
        ends = (address, address + size - 1)
        return all(
            torch.frombuffer(ctypes.c_byte.from_address(at), dtype=torch.int8).is_pinned()
            for at in ends
        )

    def addresses(
        self, pages: int, positions: NDArray[np.int64], layers: int | None = None
    ) -> NDArray[np.int64]:
        """Where those positions of a prompt stand in its pages (`Tokens`), which begin at the
        address `pages`.

        Args:
            layers: that each page has there; None: all.
        """
        page, slot = np.divmod(positions, self._pages.page_tokens)
        size = self._pages.layer_bytes // 2 // self._pages.page_tokens
        every = (layers or self._pages.layers) * self._pages.layer_bytes
        found: NDArray[np.int64] = pages + page * every + slot * size
        return found

    def to_pages(self, tokens: Tokens, layers: range, *, programs: int = PROGRAMS) -> None:
        """Those layers of the tokens, into pages that have all layers.

        Args:
            programs: at most; pages in the device's own memory can use more.
        """
        self._launch(tokens, layers, layers.start, programs, to_pages=True)

    def from_pages(self, tokens: Tokens, layers: range, *, programs: int = PROGRAMS) -> None:
        """Those layers of the tokens, from page memory that begins with them."""
        self._launch(tokens, layers, 0, programs, to_pages=False)

    def _launch(
        self, tokens: Tokens, layers: range, first_on_page: int, most: int, *, to_pages: bool
    ) -> None:
        rows, count = len(tokens.places), len(layers)
        programs = min(-(-rows // self._rows), max(1, most // count))
        _copy[(programs, count)](
            *(self._bases, *tokens, rows, self._bases.shape[1], layers.start, first_on_page),
            self._head_stride,
            **self._constants,
            TO_PAGES=to_pages,
        )
