"""The seam between a replica's legs and the engine's KV memory, wherever that lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pdctl.engines.exports import Memory
from pdctl.handoff.arena import Bytes
from pdctl.handoff.device import DeviceMaker, Pages
from pdctl.handoff.page import Patterns
from pdctl.handoff.sink import Piece


class Span(msgspec.Struct, frozen=True):
    """Positions [start, stop) of one prompt, which a step brings into its blocks."""

    blocks: Sequence[int]
    """The sequence's, from position 0 on."""
    start: int
    stop: int
    pages: Pages
    """`[pages, layers, 2, page_tokens, kv_heads, head_dim]`: the whole prompt's."""


class Blocks(Memory[Span], Protocol):
    """One engine's KV memory: `layout.py` on a CPU, `cuda.py` on an NVIDIA GPU.

    Reading and writing may run on different threads for different blocks; vLLM gives no block to
    another request before both are over.
    """

    block_tokens: int

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def page_memory(self) -> Callable[[int], Bytes] | None:
        """Makes the memory that pages and pieces should lie in; None: any will do."""
        ...

    @property
    def lock(self) -> Callable[[Bytes], None] | None:
        """Makes memory of somebody else's what `page_memory` makes, for as long as that array
        lives; None: any will do."""
        ...

    @property
    def device(self) -> DeviceMaker:
        """Makes memory where the blocks themselves lie, for pages that are read from there."""
        ...

    def fence(self) -> None:
        """Worker thread, when a request was given blocks to be written: their former owner's
        last forward may still be under way, and comes before every `write` that follows."""
        ...

    def write(
        self, blocks: Sequence[int], start: int, stop: int, first_layer: int, piece: Patterns
    ) -> None:
        """Places positions [start, stop), which lie in one page, of some layers, from a
        handoff's thread.

        Args:
            piece: `[layers, 2, page_tokens, kv_heads, head_dim]`, that page's; the memory is
                another's as `PageSink.write` says.
        """
        ...

    def write_from(
        self, blocks: Sequence[int], parts: Sequence[tuple[range, Piece]]
    ) -> Callable[[], bool]:
        """As `write`, of pieces in memory that `device` made, each with the positions of its pages
        that are placed. It waits for nothing: `DeviceSink.write_from` says what it returns, and
        what it means where it raises."""
        ...

    def write_pages(
        self, blocks: Sequence[int], start: int, stop: int, pages: Sequence[Patterns]
    ) -> None:
        """Positions [start, stop), one at least, of every layer stand in the blocks for every
        forward that is begun after the return. Any thread.

        Args:
            pages: `[layers, 2, page_tokens, kv_heads, head_dim]` each: the prompt's, from its first
                on, up to `stop` at least.
        """
        ...

    def flush(self) -> None:
        """What this thread has written stands in the blocks for every forward that is begun
        after the return."""
        ...

    def close(self) -> None:
        """Ends what runs beside the engine; bounded."""
        ...
