"""Where SGLang keeps a token's K and V, and the two copies between its slots and canonical pages.

One tensor per layer for K and one for V, each `[slots, kv_heads, head_dim]`, K after RoPE
(0.5.21 to 0.5.23, measured). Slots come in blocks of 64 that belong to one sequence: block b is
slots [64 b, 64 b + 64), which is just what a canonical page holds of that layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from pdctl.handoff.page import PageGeometry, Patterns
from pdctl.topology.model import Dtype

PAGE_DTYPES = {Dtype.FLOAT16: torch.float16, Dtype.BFLOAT16: torch.bfloat16}


class SlotPool:
    """SGLang's KV memory on a CPU or a GPU. Layers are in the model's order.

    `read` and `write` may run on different threads for different blocks. On a GPU each thread
    copies on a stream of its own and waits for it, so that neither returns before its bytes are
    where they belong.
    """

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
        self.device = self._keys[0].device
        self.dtype = self._keys[0].dtype

    def read(self, blocks: Sequence[int], first_page: int, last_slots: int, into: Patterns) -> None:
        """Copies whole blocks of a sequence into its pages, of the last one its first slots.

        Args:
            blocks: one or more.
            first_page: the page that the first block is.
            last_slots: how many of the last block's slots hold tokens.
            into: `[pages, layers, 2, page_tokens, kv_heads, head_dim]`.
        """
        stop = first_page + len(blocks)
        pages = torch.from_numpy(into[first_page:stop].view(np.int16)).view(self._page_dtype)
        with self._own_stream():
            near = self.device.type == "cpu"
            target = pages if near else torch.zeros_like(pages, device=self.device)
            index = torch.tensor(blocks, device=self.device)
            for layer, pair in enumerate(zip(self._keys, self._values, strict=True)):
                for half, memory in enumerate(pair):
                    found = memory[index]
                    target[:-1, layer, half] = found[:-1]
                    target[-1, layer, half, :last_slots] = found[-1, :last_slots]
            if not near:
                pages.copy_(target)

    def write(self, block: int, slots: range, first_layer: int, piece: Patterns) -> None:
        """Places some slots of one page into one block, of some layers.

        Args:
            piece: `[layers, 2, page_tokens, kv_heads, head_dim]`, that page's.
        """
        source = piece if piece.flags.writeable else piece.copy()
        tokens = torch.from_numpy(source.view(np.int16)).view(self._page_dtype)
        at = slice(slots.start, slots.stop)
        with self._own_stream():
            placed = tokens[:, :, at].to(self.device).to(self.dtype)
            for layer, (key, value) in enumerate(placed, start=first_layer):
                self._keys[layer][block, at] = key
                self._values[layer][block, at] = value

    def after(self, *streams: Any) -> Any:
        """What `wait` lets copies come after: everything that these streams and the calling
        thread's own have been given so far. None on a CPU."""
        if self.device.type != "cuda":
            return None
        events = []
        for stream in (torch.cuda.current_stream(self.device), *streams):
            event = torch.cuda.Event()
            event.record(stream)
            events.append(event)
        return events

    def wait(self, events: Any) -> None:
        """Blocks the calling thread until then."""
        for event in events or ():
            event.synchronize()

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        if self.device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def streams_in_use(scheduler: Any) -> list[Any]:
    """On a GPU, those that a forward which still runs may write the KV memory on."""
    names = ("forward_stream", "schedule_stream")
    found = (getattr(scheduler, name, None) for name in names)
    return [stream for stream in found if stream is not None]


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
