"""Pages of the host's page store on their way into vLLM's blocks."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pdctl.engines.ahead import take_ahead
from pdctl.engines.vllm.interface import Blocks
from pdctl.handoff.arena import Arena, Bytes, arena_of
from pdctl.handoff.page import PATTERN, PageGeometry, Patterns
from pdctl.handoff.store.interface import PageStore

LOAD_BYTES = 64 << 20
"""Pages on their way in through memory that the GPU reads; two at least."""


class Inlet:
    """What all prompts of one engine share. Any thread, one at a time copies."""

    def __init__(self, store: PageStore, blocks: Blocks, pages: PageGeometry) -> None:
        self._store, self._blocks, self._pages = store, blocks, pages
        self._copying = threading.Lock()
        self._within_reach: Arena[Bytes] | None = None
        if blocks.page_memory is not None:
            size = max(LOAD_BYTES, 2 * pages.page_bytes)
            self._within_reach = arena_of(blocks.page_memory(size))

    def fill(self, pages: Sequence[Patterns], blocks: Sequence[int], start: int, stop: int) -> None:
        """Positions [start, stop) of a prompt stand in its blocks afterwards.

        Args:
            pages: the prompt's first ones, up to `stop` at least.
        """
        size = self._pages.page_tokens
        with self._copying:
            while start < stop:
                end = min(stop, (start // size + 1) * size)
                self._blocks.write(blocks, start, end, 0, self._reachable(pages[start // size]))
                start = end
            self._blocks.flush()

    def take_ahead(
        self, token_ids: Sequence[int], salt: str, blocks: Sequence[int], held: int, stop: int
    ) -> int:
        """As `ahead.take_ahead`."""

        def fill(pages: Sequence[Patterns], start: int, stop: int) -> None:
            self.fill(pages, blocks, start, stop)

        return take_ahead(self._store, token_ids, salt, held=held, stop=stop, fill=fill)

    def _reachable(self, page: Patterns) -> Patterns:
        """That page, in memory that the engine's copies read."""
        if self._within_reach is None:
            return page
        memory = self._within_reach.take(page.nbytes)
        if memory is None:
            # those before it are given back once they have been read
            self._blocks.flush()
            memory = self._within_reach.take(page.nbytes)
            assert memory is not None, "nobody else takes any"
        near = memory.view(PATTERN).reshape(page.shape)
        near[...] = page
        return near
