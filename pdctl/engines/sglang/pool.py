"""Where SGLang keeps a token's K and V, and the two copies between its slots and canonical pages.

One tensor per layer for K and one for V, each `[slots, kv_heads, head_dim]`, K after RoPE (0.5.21
to 0.5.23, measured). Slots come in blocks of 64 that belong to one sequence: block b is slots
[64 b, 64 b + 64), which is just what a canonical page holds of that layer. So it is whatever the
attention backend (`mem_cache/memory_pool.py`): what lays a block's heads apart is
`SGLANG_USE_HND_KVCACHE` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pdctl.engines.device import TorchDevice, tensor_of
from pdctl.handoff.arena import Bytes
from pdctl.handoff.device import Pages
from pdctl.handoff.page import PageGeometry, Patterns
from pdctl.handoff.sink import Piece
from pdctl.topology.model import Dtype

PAGE_DTYPES = {Dtype.FLOAT16: torch.float16, Dtype.BFLOAT16: torch.bfloat16}


class Part(NamedTuple):
    """A piece, and where it goes."""

    blocks: Sequence[int]
    """Of its pages."""
    tokens: int
    """How many of their first slots, counted through, are written."""
    piece: Piece


class SlotPool:
    """SGLang's KV memory on a CPU. Layers are in the model's order.

    `read` and `write` may run on different threads for different blocks.
    """

    page_memory: Callable[[int], Bytes] | None = None
    """Makes the memory that pages and pieces should lie in; None: any will do."""
    lock: Callable[[Bytes], None] | None = None
    """Makes memory of somebody else's what `page_memory` makes, for as long as that array lives;
    None: any will do."""
    leaves_by_layer = False
    """Whether it is an `exports.Memory` too."""

    def __init__(self, pool: Any, pages: PageGeometry) -> None:
        """Raises ValueError where the memory is not laid out as the module says."""
        self._pages = pages
        self._page_dtype = PAGE_DTYPES[Dtype(pages.dtype)]
        self._keys = _blocks(pool.k_buffer, pages)
        self._values = _blocks(pool.v_buffer, pages)
        layout = getattr(pool, "kv_cache_layout", "nhd")
        if pool.page_size != pages.page_tokens or layout != "nhd":
            raise ValueError(f"its blocks have {pool.page_size} slots and the layout {layout!r}")
        self.page_bytes = pages.page_bytes
        self.dtype = self._keys[0].dtype
        self.device = TorchDevice(self._keys[0].device)
        """Makes memory where the slots themselves lie, for pages that are read from there."""

    def read(self, blocks: Sequence[int], first_page: int, last_slots: int, into: Pages) -> None:
        """Copies whole blocks of a sequence, which are computed, into its pages, of the last one
        its first slots.

        Args:
            blocks: one or more.
            first_page: the page that the first block is.
            last_slots: how many of the last block's slots hold tokens.
            into: `[pages, layers, 2, page_tokens, kv_heads, head_dim]`.
        """
        stop = first_page + len(blocks)
        target = tensor_of(into, self._page_dtype, (-1, *self._pages.shape))[first_page:stop]
        index = torch.tensor(blocks)
        for layer, pair in enumerate(zip(self._keys, self._values, strict=True)):
            for half, memory in enumerate(pair):
                found = memory[index]
                target[:-1, layer, half] = found[:-1]
                target[-1, layer, half, :last_slots] = found[-1, :last_slots]

    def write(self, block: int, slots: range, first_layer: int, piece: Patterns) -> None:
        """Places some slots of one page into one block, of some layers.

        Args:
            piece: `[layers, 2, page_tokens, kv_heads, head_dim]`, that page's; the memory is
                another's as `PageSink.write` says.
        """
        source = piece if piece.flags.writeable else piece.copy()
        tokens = tensor_of(source, self._page_dtype, source.shape)
        self._write(block, slots, first_layer, tokens)

    def write_from(self, parts: Sequence[Part]) -> Callable[[], bool]:
        """As `write`, of pieces in memory that `device` made. It waits for nothing:
        `DeviceSink.write_from` says what it returns, and what it means where it raises."""
        size = self._pages.page_tokens
        for blocks, count, piece in parts:
            shape = (piece.pages, piece.layers, *self._pages.shape[1:])
            pages = tensor_of(piece.at, self._page_dtype, shape)
            for at, (block, tokens) in enumerate(zip(blocks, pages, strict=True)):
                slots = range(min(size, count - at * size))
                self._write(block, slots, piece.first_layer, tokens)
        return lambda: True

    def write_pages(self, blocks: Sequence[int], pages: Sequence[Patterns]) -> None:
        """As many whole pages as there are blocks, one at least, stand in them for every forward
        that is begun after the return. Any thread."""
        for block, page in zip(blocks, pages, strict=False):
            self.write(block, range(self._pages.page_tokens), 0, page)

    def _write(self, block: int, slots: range, first_layer: int, tokens: torch.Tensor) -> None:
        at = slice(slots.start, slots.stop)
        placed = tokens[:, :, at].to(self.dtype)
        for layer, (key, value) in enumerate(placed, start=first_layer):
            self._keys[layer][block, at] = key
            self._values[layer][block, at] = value

    def flush(self) -> None:
        """What this thread has written stands in the blocks for every forward that is begun
        after the return."""

    def fence(self) -> None:
        """Scheduler's thread, when blocks were given to be written: their former owner's last
        forward may still be under way, and comes before every `write` that follows."""

    def close(self) -> None:
        """Ends what runs beside the engine; bounded."""


def streams_in_use(scheduler: Any) -> list[Any]:
    """On a GPU, those that a forward which still runs may write the KV memory on: SGLang computes
    on `forward_stream` where it overlaps steps, else on the one that is current, which its loop
    makes `schedule_stream`."""
    names = ("forward_stream", "schedule_stream")
    found = (getattr(scheduler, name, None) for name in names)
    return [stream for stream in found if stream is not None]


def open_pool(scheduler: Any, pages: PageGeometry) -> SlotPool:
    """Raises ValueError, AttributeError: KV memory that pdctl does not convert."""
    memory = scheduler.token_to_kv_pool_allocator.get_kvcache()
    device = memory.k_buffer[0].device
    if device.type == "cpu":
        return SlotPool(memory, pages)
    if device.type != "cuda":
        raise ValueError(f"it lies on a device of type {device.type}")
    from pdctl.engines.cuda.stream import SideStream
    from pdctl.engines.sglang.cuda import CudaSlots
    from pdctl.engines.sglang.cuda_proof import check

    side = SideStream(device, lambda: streams_in_use(scheduler))
    slots = CudaSlots(memory, pages, scheduler.req_to_token_pool.req_to_token, side)
    check(slots, memory, pages)
    return slots


def _blocks(layers: Sequence[torch.Tensor], pages: PageGeometry) -> list[torch.Tensor]:
    """Each layer as `[blocks, page_tokens, kv_heads, head_dim]`, the same memory."""
    row = (pages.kv_heads, pages.head_dim)
    if len(layers) != pages.layers:
        raise ValueError(f"it has {len(layers)} layers, the contract has {pages.layers}")
    for layer in layers:
        fits = layer.dim() == 3 and tuple(layer.shape[1:]) == row and layer.is_contiguous()
        if not fits or layer.dtype.itemsize not in (2, 4) or not layer.is_floating_point():
            raise ValueError(f"a layer's memory is {layer.dtype} {tuple(layer.shape)}")
    whole = len(layers[0]) // pages.page_tokens * pages.page_tokens
    return [layer[:whole].view(-1, pages.page_tokens, *row) for layer in layers]
