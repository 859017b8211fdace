"""Pages of the host's page store on their way into vLLM's blocks."""

from __future__ import annotations

from collections.abc import Sequence

from pdctl.engines.ahead import take_ahead
from pdctl.engines.vllm.interface import Blocks
from pdctl.handoff.page import Patterns
from pdctl.handoff.store.interface import PageStore


class Inlet:
    """What all prompts of one engine share. Any thread."""

    def __init__(self, store: PageStore, blocks: Blocks) -> None:
        self._store, self._blocks = store, blocks

    def fill(self, pages: Sequence[Patterns], blocks: Sequence[int], start: int, stop: int) -> None:
        """Positions [start, stop) of a prompt, which may be none, stand in its blocks afterwards.

        Args:
            pages: the prompt's first ones, up to `stop` at least.
        """
        if start < stop:
            self._blocks.write_pages(blocks, start, stop, pages)

    def take_ahead(
        self, token_ids: Sequence[int], salt: str, blocks: Sequence[int], held: int, stop: int
    ) -> int:
        """As `ahead.take_ahead`."""

        def fill(pages: Sequence[Patterns], start: int, stop: int) -> None:
            self.fill(pages, blocks, start, stop)

        return take_ahead(self._store, token_ids, salt, held=held, stop=stop, fill=fill)
