"""A prompt's pages between the host's page store and vLLM's blocks, on a replica that computes
it: an ordinary or a prefill one.

In, before the prompt is computed: what the store has, as far as vLLM's own prefix cache lacks it.
Out, as it is computed: what the store has not. vLLM waits for the way in, bounded by the store's
client; nothing waits for the way out. What can't be stored isn't, and what can't be loaded is
computed: but where the store goes away while its pages are being loaded, a prefill replica's
request fails, since vLLM fails what a handoff needs and has not.

Threads: vLLM's worker thread runs the steps and copies out; the client's tells what was found;
the `Copier`'s copies in.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence

import numpy as np

from pdctl.engines.copier import Copier
from pdctl.engines.vllm.inlet import Inlet
from pdctl.engines.vllm.interface import Blocks, Span
from pdctl.engines.vllm.steps import Seek
from pdctl.handoff.arena import arena_of
from pdctl.handoff.device import host_pages
from pdctl.handoff.page import PageGeometry, Patterns
from pdctl.handoff.store.interface import Loan, PageStore
from pdctl.handoff.store.keys import PromptKeys

log = logging.getLogger("pdctl.engines.vllm")

SAVE_BYTES = 256 << 20
"""Pages on their way out of the blocks, at most; a whole step's where that has more."""

Found = Callable[[str, int], None]
Loaded = Callable[[str, Sequence[int]], None]


class Sharing:
    """What all prompts of one engine share.

    Args:
        step_tokens: vLLM computes no more in one step.
        found: told, on any thread, of each request that was sought, once: how many of its first
            positions need not be computed.
        loaded: told of each that was given blocks to be filled, once, with those that were not.
    """

    def __init__(
        self,
        store: PageStore,
        blocks: Blocks,
        pages: PageGeometry,
        *,
        step_tokens: int,
        found: Found,
        loaded: Loaded,
    ) -> None:
        self.store, self.blocks, self.pages = store, blocks, pages
        self.found, self.loaded = found, loaded
        self.copier = Copier("pdctl-import")
        size = max(SAVE_BYTES, (pages.pages_for(step_tokens) + 2) * pages.page_bytes)
        self.arena = arena_of((blocks.page_memory or _any_memory)(size))
        self.inlet = Inlet(store, blocks)

    def seek(self, seek: Seek) -> Sharer:
        """Worker thread."""
        sharer = Sharer(self, seek)
        sharer.start()
        return sharer

    def close(self) -> None:
        """Bounded; what is being copied in is copied first."""
        self.copier.close()


class Sharer:
    """One prompt. `finish` when its request has ended, whatever became of it."""

    def __init__(self, sharing: Sharing, seek: Seek) -> None:
        self._sharing = sharing
        self._request_id = seek.request_id
        self._prompt: PromptKeys = sharing.store.prompt(seek.token_ids, seek.salt)
        self._keys = self._prompt.stored()
        self._tokens = len(seek.token_ids)
        self._lock = threading.Lock()
        self._loan: Loan | None = None
        self._over = False
        self._saved: int | None = None
        """Pages that the store has, or gets; None: not known, or not to be pursued."""

    def start(self) -> None:
        self._sharing.store.hold_soon(self._prompt, self._told)

    def place(self, blocks: list[int], held_tokens: int, private: list[int]) -> None:
        """Worker thread: the request has blocks; `private` is empty where it needs nothing."""
        loan = self._take()
        if loan is not None:
            self._sharing.copier.put(lambda: self._load(loan, blocks, held_tokens, private))

    def finish(self) -> None:
        """Worker thread. A copy that is under way goes on: vLLM keeps the blocks until then."""
        with self._lock:
            self._over = True
        loan = self._take()
        if loan is not None:
            self._sharing.copier.put(loan.release)

    def saving(self, blocks: Sequence[int], positions: int) -> Saving | None:
        """Worker thread, before a forward after which `positions` of the prompt stand in
        `blocks`: the pages that are then complete and that the store has not, or None."""
        first, size = self._saved, self._sharing.pages.page_tokens
        if first is None:
            return None
        ends = positions >= self._tokens
        stop = len(self._keys) if ends else positions // size
        if stop <= first:
            return None
        positions = self._tokens if ends else stop * size
        # the copies count from a place where a page and a block begin
        every = math.lcm(size, self._sharing.blocks.block_tokens)
        base = first * size // every * every
        memory = self._sharing.arena.take((stop - base // size) * self._sharing.pages.page_bytes)
        if memory is None:
            log.info("request=%s too much waits to be stored", self._request_id)
            self.leave()
            return None
        self._saved = stop
        span = Span(
            blocks[base // self._sharing.blocks.block_tokens :],
            first * size - base,
            positions - base,
            self._sharing.pages.over(memory, positions - base),
        )
        return Saving(self, span, first, stop)

    def publish(self, first: int, stop: int, pages: Patterns) -> None:
        """Any thread."""
        parent = self._keys[first - 1] if first else None
        if not self._sharing.store.publish_soon(self._keys[first:stop], pages, parent=parent):
            self.leave()

    def leave(self) -> None:
        """Any thread: nothing more of this prompt is stored. Pages behind one that is missing
        would never be found."""
        self._saved = None

    def _told(self, loan: Loan) -> None:
        with self._lock:
            over = self._over
            if not over:
                self._loan = loan
                self._saved = loan.tokens // self._sharing.pages.page_tokens
                if loan.tokens >= self._tokens:
                    self._saved = None
        if over:
            loan.release()
        else:
            self._sharing.found(self._request_id, min(loan.tokens, self._tokens - 1))

    def _take(self) -> Loan | None:
        with self._lock:
            loan, self._loan = self._loan, None
        return loan

    def _load(self, loan: Loan, blocks: list[int], held: int, private: list[int]) -> None:
        """The copier's thread."""
        stop = min(loan.tokens, self._tokens - 1) if private else held
        lost: Sequence[int] = private
        try:
            try:
                self._sharing.inlet.fill(loan.pages, blocks, held, stop)
            except BaseException:
                loan.release()
                raise
            if loan.release(stop - held):
                lost = ()
            elif private:
                log.warning("request=%s the page store went away", self._request_id)
        finally:
            if private:
                self._sharing.loaded(self._request_id, lost)


class Saving:
    """What one step brings out of the blocks: pages [first, stop) of a prompt."""

    def __init__(self, sharer: Sharer, span: Span, first: int, stop: int) -> None:
        self.span = span
        self._sharer = sharer
        self._first, self._stop = first, stop
        self._broken = False

    def landed(self, span: Span, layers: int) -> None:
        pages = host_pages(span.pages)
        if layers == pages.shape[1] and not self._broken:
            mine = pages[len(pages) - (self._stop - self._first) :]
            self._sharer.publish(self._first, self._stop, mine)

    def taken(self, span: Span) -> None:
        return

    def broke(self, error: BaseException) -> None:
        self._broken = True
        self._sharer.leave()


def _any_memory(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.empty(size, np.uint8)
