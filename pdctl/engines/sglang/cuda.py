"""SGLang's KV memory on an NVIDIA GPU, and the copies between its slots and pages.

Copies run on a stream of their own: out of the slots into page-locked pages while a forward
computes, and into the slots piece by piece, as they arrive. No call holds SGLang's scheduler: a
step that could overwrite slots which are not copied yet waits for that on the GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pdctl.engines.cuda import writing
from pdctl.engines.cuda.filling import Filler
from pdctl.engines.cuda.kernel import Copies, Tokens
from pdctl.engines.cuda.page_locked import lock_pages, page_locked
from pdctl.engines.cuda.reading import Reader
from pdctl.engines.cuda.stream import SideStream
from pdctl.engines.cuda.writing import Writer
from pdctl.engines.sglang.pool import Part, SlotPool
from pdctl.handoff.arena import Bytes
from pdctl.handoff.device import Pages, Run, address_of_pages
from pdctl.handoff.page import PATTERN, PageGeometry, Patterns


class Span(NamedTuple):
    """Positions [start, stop) of one prompt, which a step brings into its slots."""

    row: int
    """The request's, in SGLang's table of slots."""
    start: int
    stop: int
    pages: Pages
    """`[pages, layers, 2, page_tokens, kv_heads, head_dim]`: the whole prompt's."""


class _Thread(threading.local):
    near: Bytes | None = None


class CudaSlots(SlotPool):
    """As `SlotPool`, and `exports.Memory[Span]`.

    Args:
        table: `[rows, positions]`: the slot of each position of each request, on the device. It is
            read in turn with SGLang's own writes into it, on the scheduler's current stream.
        memory: makes page-locked memory; `lock` makes such memory of what somebody else has made.
    """

    leaves_by_layer = True

    def __init__(
        self,
        pool: Any,
        pages: PageGeometry,
        table: torch.Tensor,
        side: SideStream,
        *,
        memory: Callable[[int], Bytes] = page_locked,
        lock: Callable[[Bytes], None] = lock_pages,
    ) -> None:
        """Raises ValueError where the memory is not laid out as `pool.py` says."""
        super().__init__(pool, pages)
        self.names = range(pages.layers)
        self.page_memory: Callable[[int], Bytes] = memory
        self.lock: Callable[[Bytes], None] = lock
        self._table = table
        self._side = side
        self._slot_stride = pages.kv_heads * pages.head_dim
        halves = zip(self._keys, self._values, strict=True)
        self._copies = Copies(
            [(key.data_ptr(), value.data_ptr()) for key, value in halves],
            self._keys[0].device,
            pages,
            dtype=self.dtype,
            page_dtype=self._page_dtype,
            head_stride=pages.head_dim,
            steps=(self._slot_stride,),
        )
        self._reader = Reader(self._copies, side, pages)
        self._writer = Writer(self._copies, side, memory)
        self._filler = Filler(self._copies, self._writer, pages, memory)
        self._thread = _Thread()

    def over(self, pool: Any, table: torch.Tensor) -> CudaSlots:
        """The same copies, of other memory that is laid out alike."""
        return CudaSlots(
            pool, self._pages, table, self._side, memory=self.page_memory, lock=self.lock
        )

    def close(self) -> None:
        self._reader.close()

    # -- out of the slots, in a step

    def begin_step(self, spans: Sequence[Span]) -> None:
        self._reader.hold_model()
        if spans:
            slots = torch.cat([self._table[span.row, span.start : span.stop] for span in spans])
            places = self._copies.places(slots.to(torch.int64) * self._slot_stride)
            addresses = [
                self._copies.addresses(
                    address_of_pages(span.pages), np.arange(span.start, span.stop)
                )
                for span in spans
            ]
            tokens = Tokens(places, self._copies.near(np.concatenate(addresses)))
            near = all(isinstance(span.pages, Run) for span in spans)
            self._reader.begin(tokens, spans, near=near)

    def gather(self, layer: int, landed: Callable[[], None]) -> None:
        self._reader.gather(layer, landed)

    # -- out of the slots, from a thread that waits for it

    def read(self, blocks: Sequence[int], first_page: int, last_slots: int, into: Pages) -> None:
        count = (len(blocks) - 1) * self._pages.page_tokens + last_slots
        if count == 0:
            return
        if isinstance(into, Run) or self._copies.reaches(into):
            first = address_of_pages(into) + first_page * self._pages.page_bytes
            self._read(blocks, count, first)
            return
        pages = into[first_page : first_page + len(blocks)]
        near = self._near(pages)
        self._read(blocks, count, address_of_pages(near))
        pages[:-1] = near[:-1]
        pages[-1, :, :, :last_slots] = near[-1, :, :, :last_slots]

    # -- into the slots

    def fence(self) -> None:
        self._side.hold_side()

    def write(self, block: int, slots: range, first_layer: int, piece: Patterns) -> None:
        """Several at a time: a launch costs more than it copies."""
        self._writer.write(self._places(block, np.array(slots)), slots.start, first_layer, piece)

    def write_from(self, parts: Sequence[Part]) -> Callable[[], bool]:
        """One launch for those of the same layers."""
        pieces = []
        for blocks, tokens, piece in parts:
            at = np.arange(tokens)
            addresses = self._copies.addresses(piece.at.address, at, piece.layers)
            layers = range(piece.first_layer, piece.first_layer + piece.layers)
            page, slot = np.divmod(at, self._pages.page_tokens)
            places = self._places(np.array(blocks, dtype=np.int64)[page], slot)
            rows = np.stack([places, addresses])
            pieces.append(writing.Piece(rows, layers, piece.at))
        return self._writer.write_from(pieces).query

    def write_pages(self, blocks: Sequence[int], pages: Sequence[Patterns]) -> None:
        page, slot = np.divmod(
            np.arange(len(blocks) * self._pages.page_tokens), self._pages.page_tokens
        )
        places = self._places(np.array(blocks, dtype=np.int64)[page], slot)
        self._filler.fill(places, 0, pages)

    def flush(self) -> None:
        self._writer.flush()

    # -- inside

    def _read(self, blocks: Sequence[int], count: int, pages: int) -> None:
        """The blocks' first positions into pages that begin at an address."""
        at = np.arange(count)
        page, slot = np.divmod(at, self._pages.page_tokens)
        places = self._places(np.array(blocks, dtype=np.int64)[page], slot)
        tokens = self._copies.tokens(np.stack([places, self._copies.addresses(pages, at)]))
        self._side.run(lambda: self._copies.to_pages(tokens, self.names)).synchronize()

    def _places(self, block: Any, slot: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the kernel finds slots of blocks in a layer's memory."""
        slots = block * self._pages.page_tokens + slot
        found: NDArray[np.int64] = self._copies.places(slots * self._slot_stride)
        return found

    def _near(self, pages: Patterns) -> Patterns:
        """This thread's own memory, within the GPU's reach, for pages that are not."""
        kept = self._thread.near
        if kept is None or kept.nbytes < pages.nbytes:
            kept = self._thread.near = self.page_memory(pages.nbytes)
        return kept[: pages.nbytes].view(PATTERN).reshape(pages.shape)
