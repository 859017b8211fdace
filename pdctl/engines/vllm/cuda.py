"""vLLM's KV memory on an NVIDIA GPU, and the copies between its blocks and pages.

Copies run on a stream of their own: out of the blocks into page-locked pages while a forward pass
computes, and into the blocks piece by piece, as they arrive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pdctl.engines.cuda import writing
from pdctl.engines.cuda.filling import Filler
from pdctl.engines.cuda.kernel import Copies
from pdctl.engines.cuda.page_locked import lock_pages, page_locked
from pdctl.engines.cuda.reading import Reader
from pdctl.engines.cuda.stream import SideStream
from pdctl.engines.cuda.writing import Writer
from pdctl.engines.device import TorchDevice
from pdctl.engines.vllm.cuda_layout import Backend, layout_of
from pdctl.engines.vllm.interface import Span
from pdctl.engines.vllm.layout import PAGE_DTYPES, in_order
from pdctl.handoff.device import Run, address_of_pages
from pdctl.handoff.page import PageGeometry, Patterns
from pdctl.handoff.sink import Piece
from pdctl.topology.model import Dtype


class _Places:
    """Of one request: the pieces of a page come one after the other, layer by layer."""

    def __init__(self) -> None:
        self._blocks: Sequence[int] = ()
        self._found: dict[tuple[int, int], NDArray[np.int64]] = {}

    def of(
        self,
        blocks: Sequence[int],
        start: int,
        stop: int,
        find: Callable[[Sequence[int], int, int], NDArray[np.int64]],
    ) -> NDArray[np.int64]:
        if blocks is not self._blocks:
            self._blocks, self._found = blocks, {}
        if (start, stop) not in self._found:
            self._found[start, stop] = find(blocks, start, stop)
        return self._found[start, stop]


class _Thread(threading.local):
    """One handoff's thread."""

    def __init__(self) -> None:
        self.places = _Places()


class CudaBlocks:
    """One engine's registered KV memory on a GPU (`interface.Blocks`).

    Args:
        block_tokens: vLLM's block size.
        memory: makes page-locked memory; pages and pieces that lie in other memory are refused
            or copied once more. `lock` makes such memory of what somebody else has made.
    """

    def __init__(
        self,
        caches: Mapping[str, torch.Tensor],
        pages: PageGeometry,
        backend: Backend,
        block_tokens: int,
        *,
        side: SideStream | None = None,
        memory: Callable[[int], NDArray[np.uint8]] = page_locked,
        lock: Callable[[NDArray[np.uint8]], None] = lock_pages,
    ) -> None:
        """Raises ValueError where the memory is laid out as pdctl does not know."""
        self.names = in_order(caches)
        self.layers = [caches[name] for name in self.names]
        self.block_tokens = block_tokens
        first = self.layers[0]
        self.compute_dtype = first.dtype
        self.page_memory = memory
        self.lock = lock
        self.device = TorchDevice(first.device)
        self.layout = layout_of(backend, self.layers, pages, block_tokens)
        self._backend = backend
        self._pages = pages
        self._copies = self._opened_copies(first)
        self._side = side or SideStream(first.device)
        self._reader = Reader(self._copies, self._side, pages)
        self._writer = Writer(self._copies, self._side, memory)
        self._filler = Filler(self._copies, self._writer, pages, memory)
        self._thread = _Thread()

    def over(self, caches: Mapping[str, torch.Tensor]) -> CudaBlocks:
        """The same copies, of other memory that is laid out alike."""
        return CudaBlocks(
            caches,
            self._pages,
            self._backend,
            self.block_tokens,
            side=self._side,
            memory=self.page_memory,
            lock=self.lock,
        )

    def close(self) -> None:
        """Bounded: what is under way lands first."""
        self._reader.close()

    # -- out of the blocks

    def begin_step(self, spans: Sequence[Span]) -> None:
        self._reader.hold_model()
        if spans:
            rows = [self._rows(span) for span in spans]
            near = all(isinstance(span.pages, Run) for span in spans)
            tokens = self._copies.tokens(np.concatenate(rows, axis=1))
            self._reader.begin(tokens, spans, near=near)

    def gather(self, layer: int, landed: Callable[[], None]) -> None:
        self._reader.gather(layer, landed)

    # -- into the blocks

    def fence(self) -> None:
        self._side.hold_side()

    def write(
        self, blocks: Sequence[int], start: int, stop: int, first_layer: int, piece: Patterns
    ) -> None:
        places = self._thread.places.of(blocks, start, stop, self._places)
        self._writer.write(places, start % self._pages.page_tokens, first_layer, piece)

    def write_from(
        self, blocks: Sequence[int], parts: Sequence[tuple[range, Piece]]
    ) -> Callable[[], bool]:
        """One launch for those of the same layers."""
        pieces = []
        for at, piece in parts:
            places = self._thread.places.of(blocks, at.start, at.stop, self._places)
            within = np.arange(at.start, at.stop) - piece.positions.start
            addresses = self._copies.addresses(piece.at.address, within, piece.layers)
            rows = np.stack([places, addresses])
            layers = range(piece.first_layer, piece.first_layer + piece.layers)
            pieces.append(writing.Piece(rows, layers, piece.at))
        return self._writer.write_from(pieces).query

    def flush(self) -> None:
        self._writer.flush()

    def write_pages(
        self, blocks: Sequence[int], start: int, stop: int, pages: Sequence[Patterns]
    ) -> None:
        self._filler.fill(self._places(blocks, start, stop), start, pages)

    # -- inside

    def _opened_copies(self, first: torch.Tensor) -> Copies:
        layout, pages = self.layout, self._pages
        half_bytes = layout.half_stride * first.element_size()
        return Copies(
            [(m.data_ptr(), m.data_ptr() + half_bytes) for m in self.layers],
            first.device,
            pages,
            dtype=first.dtype,
            page_dtype=PAGE_DTYPES[Dtype(pages.dtype)],
            head_stride=layout.head_stride,
            steps=(layout.block_stride, layout.slot_stride, layout.half_stride),
        )

    def _rows(self, span: Span) -> NDArray[np.int64]:
        """A span's places and addresses, as the kernel takes them."""
        at = np.arange(span.start, span.stop)
        addresses = self._copies.addresses(address_of_pages(span.pages), at)
        return np.stack([self._places(span.blocks, span.start, span.stop), addresses])

    def _places(self, blocks: Sequence[int], start: int, stop: int) -> NDArray[np.int64]:
        """Where the kernel finds positions [start, stop) in a layer's memory."""
        at = np.arange(start, stop)
        first, last = start // self.block_tokens, (stop - 1) // self.block_tokens
        held = np.array(blocks[first : last + 1], dtype=np.int64)
        slots = held[at // self.block_tokens - first] * self.block_tokens + at % self.block_tokens
        found: NDArray[np.int64] = self._copies.places(self.layout.place(slots))
        return found
