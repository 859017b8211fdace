"""The seam between a replica's legs and the engine's KV memory, wherever that lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pdctl.handoff.page import Patterns


class Span(msgspec.Struct, frozen=True):
    """Positions [start, stop) of one prompt, which a step brings into its blocks."""

    blocks: Sequence[int]
    """The sequence's, from position 0 on."""
    start: int
    stop: int
    pages: Patterns
    """`[pages, layers, 2, page_tokens, kv_heads, head_dim]`: the whole prompt's."""


class Blocks(Protocol):
    """One engine's KV memory: `layout.py` on a CPU.

    A step is `begin_step`, then `gather` of each layer, in order. Reading and writing may run
    on different threads for different blocks; vLLM gives no block to another request before
    both are over.
    """

    block_tokens: int

    @property
    def names(self) -> Sequence[str]:
        """Layers, as vLLM calls them, in the model's order."""
        ...

    def begin_step(self, spans: Sequence[Span]) -> None:
        """Worker thread, before the forward: all that one step's copies need but the layer is
        prepared here."""
        ...

    def gather(self, layer: int, landed: Callable[[], None]) -> None:
        """Copies that layer of the step's spans into their pages. Worker thread, inside the
        forward: it copies, or enqueues the copy, and returns.

        Args:
            landed: called once the layer stands in the pages of every span; once, on any
                thread, in the layers' order.
        """
        ...

    def write(
        self, blocks: Sequence[int], start: int, stop: int, first_layer: int, piece: Patterns
    ) -> None:
        """Places positions [start, stop), which lie in one page, of some layers, from a
        handoff's thread.

        Args:
            piece: `[layers, 2, page_tokens, kv_heads, head_dim]`, that page's; the memory is
                another's after the return.
        """
        ...

    def flush(self) -> None:
        """What this thread has written stands in the blocks for every forward that is begun
        after the return."""
        ...
