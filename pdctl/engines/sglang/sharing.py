"""Prompts of an ordinary or a prefill replica and the host's page store, in SGLang's scheduler.

SGLang's own way to an outer store, HiCache, goes through a pool in host memory that only CUDA and
HIP kernels copy to, and hands on neither tokens nor a prompt's partial tail. So pages go straight
between the store and SGLang's blocks. A request waits in SGLang's own queue until what the store
has of its prompt lies in blocks and in the radix tree, where SGLang finds it like any other
prefix:

    Asked    →  Landing  the store has pages that the tree lacks
    Asked    →  Ready    it has not, or is away
    Landing  →  Ready    they are in the tree; or the store went away, and their blocks are free

Once a prompt is computed, the pages that the store lacks are copied out: its full ones by a
thread, from blocks that the tree keeps meanwhile, and its partial tail at once, since that block
stays the request's own.

Threads: the scheduler's calls all but `_load` and `_save`, which are their copiers', and what the
store's client is told. Nothing here fails a request (R34, R35).
"""

from __future__ import annotations

import enum
import logging
import queue
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pdctl.engines.copier import Copier
from pdctl.engines.sglang.spec import CACHE_FIELD
from pdctl.handoff.page import PageGeometry, Patterns
from pdctl.handoff.store.interface import Loan, PageStore
from pdctl.topology.model import PAGE_TOKENS

if TYPE_CHECKING:
    from pdctl.engines.sglang.pool import SlotPool
    from pdctl.engines.sglang.tree import Held, Lock, Taken, Tree

log = logging.getLogger("pdctl.engines.sglang")

PART_BYTES = 16 << 20
"""Of pages copied out at a time, one page at least."""


class Standing(enum.Enum):
    ASKED = "asked"
    LANDING = "landing"
    READY = "ready"


class Prompt:
    """One request's."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.keys: tuple[bytes, ...] = ()
        self.standing = Standing.READY
        self.stored: int | None = None
        """Pages that the store has; None: not known, or all is stored, or soon will be."""

    @property
    def full_pages(self) -> int:
        return self.tokens // PAGE_TOKENS

    @property
    def usable_pages(self) -> int:
        """SGLang's tree has whole pages, and it computes a prompt's last token."""
        return (self.tokens - 1) // PAGE_TOKENS


class Sharing:
    """`look` before each choice of what runs next; `begin` and `end` around each result."""

    def __init__(
        self, scheduler: Any, store: PageStore, pool: SlotPool, tree: Tree, pages: PageGeometry
    ) -> None:
        self._scheduler, self._store, self._pool = scheduler, store, pool
        self._tree, self._pages = tree, pages
        self._prompts: weakref.WeakKeyDictionary[Any, Prompt] = weakref.WeakKeyDictionary()
        self._told: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._importer, self._exporter = Copier("pdctl-import"), Copier("pdctl-export")
        self.moving = 0
        """Copies that are under way: blocks or locks of the tree are held for them."""

    # -- before a batch is chosen

    def look(self) -> list[Any]:
        """The waiting requests that may not run yet."""
        while not self._told.empty():
            _guarded(self._told.get())
        waiting = self._scheduler.waiting_queue
        for req in waiting:
            if req not in self._prompts:
                self._meet(req)
        held = [req for req in waiting if self._waits(req)]
        if held or self.moving:
            # threads that copy need the interpreter, and an idle scheduler never leaves it
            time.sleep(0)
        return held

    def _waits(self, req: Any) -> bool:
        prompt = self._prompts.get(req)
        return prompt is not None and prompt.standing is not Standing.READY

    def _meet(self, req: Any) -> None:
        prompt = self._prompts[req] = Prompt(len(req.origin_input_ids))
        usable = prompt.usable_pages
        try:
            # one that was retracted has been computed once
            if past_stores(req):
                return
            if usable and not req.output_ids and self._tree.held(req, usable).pages < usable:
                self._ask(req, prompt)
        # a prompt that can't be looked for is computed
        except Exception:
            log.exception("req=%s its prompt can't be looked for", req.rid)
            prompt.standing = Standing.READY

    def _ask(self, req: Any, prompt: Prompt) -> None:
        found = self._store.prompt(list(req.origin_input_ids), salt_of(req))
        prompt.keys = found.stored()
        prompt.standing = Standing.ASKED
        self._store.hold_soon(
            found, lambda loan: self._told.put(partial(self._answered, req, prompt, loan))
        )

    def _answered(self, req: Any, prompt: Prompt, loan: Loan) -> None:
        prompt.standing = Standing.READY
        if loan.tokens < prompt.tokens:
            prompt.stored = loan.tokens // PAGE_TOKENS
        # it may have been aborted meanwhile
        wanted = any(each is req for each in self._scheduler.waiting_queue)
        begun = False
        try:
            begun = wanted and self._begin_load(req, prompt, loan)
        finally:
            if not begun:
                self._importer.put(loan.release)

    def _begin_load(self, req: Any, prompt: Prompt, loan: Loan) -> bool:
        stop = min(loan.tokens // PAGE_TOKENS, prompt.usable_pages)
        held = self._tree.held(req, stop)
        if held.pages >= stop:
            return False
        lock = self._tree.lock(held)
        taken = self._tree.take(stop - held.pages)
        if taken is None:
            self._tree.unlock(lock)
            return False
        prompt.standing = Standing.LANDING
        self.moving += 1
        landed = partial(self._landed, req, prompt, held, lock, taken)
        self._importer.put(lambda: self._load(loan, held.pages, taken, landed))
        return True

    def _load(self, loan: Loan, first: int, taken: Taken, landed: Callable[[bool], None]) -> None:
        """The importer's thread."""
        whole = False
        try:
            try:
                self._pool.write_pages(taken.blocks, loan.pages[first:])
            except BaseException:
                loan.release()
                raise
            whole = loan.release(len(taken.blocks) * PAGE_TOKENS)
        finally:
            self._told.put(partial(landed, whole))

    def _landed(
        self, req: Any, prompt: Prompt, held: Held, lock: Lock, taken: Taken, whole: bool
    ) -> None:
        prompt.standing = Standing.READY
        self.moving -= 1
        try:
            if whole:
                self._tree.insert(req, held, taken)
            else:
                log.warning("req=%s the page store went away; computing", req.rid)
                self._tree.give_back(taken)
        finally:
            self._tree.unlock(lock)

    # -- around a result

    def begin(self, reqs: Sequence[Any]) -> list[tuple[Any, Prompt, int | None]]:
        """Of those whose prompt may be computed with this result: the block of its tail."""
        found: list[tuple[Any, Prompt, int | None]] = []
        for req in reqs:
            prompt = self._prompts.get(req)
            if prompt is not None and prompt.stored is not None:
                _guarded(partial(self._note, found, req, prompt))
        return found

    def end(self, begun: Sequence[tuple[Any, Prompt, int | None]]) -> None:
        """The result is in the tree, and nothing has been given blocks since."""
        for req, prompt, tail_block in begun:
            if req.output_ids:
                _guarded(partial(self._begin_save, req, prompt, tail_block))

    def _note(self, found: list[Any], req: Any, prompt: Prompt) -> None:
        found.append((req, prompt, self._tree.tail_block(req, prompt.tokens)))

    def _begin_save(self, req: Any, prompt: Prompt, tail_block: int | None) -> None:
        first, prompt.stored = prompt.stored, None
        assert first is not None
        held = self._tree.held(req, prompt.full_pages)
        tail = None
        if tail_block is not None and held.pages == prompt.full_pages:
            tail = self._pages.empty(PAGE_TOKENS)
            self._pool.read([tail_block], 0, prompt.tokens % PAGE_TOKENS, tail)
        lock = self._tree.lock(held)
        self.moving += 1
        self._exporter.put(lambda: self._save(prompt.keys, first, held.blocks, tail, lock))

    def _save(
        self,
        keys: tuple[bytes, ...],
        first: int,
        blocks: list[int],
        tail: Patterns | None,
        lock: Lock,
    ) -> None:
        """The exporter's thread. Pages behind one that is missing would never be found."""
        try:
            step = max(1, PART_BYTES // self._pages.page_bytes)
            for at in range(first, len(blocks), step):
                part = blocks[at : at + step]
                pages = self._pages.empty(len(part) * PAGE_TOKENS)
                self._pool.read(part, 0, PAGE_TOKENS, pages)
                if not self._publish(keys, at, pages):
                    return
            if tail is not None:
                self._publish(keys, len(blocks), tail)
        finally:
            self._told.put(partial(self._saved, lock))

    def _publish(self, keys: tuple[bytes, ...], first: int, pages: Patterns) -> bool:
        parent = keys[first - 1] if first else None
        return self._store.publish_soon(keys[first : first + len(pages)], pages, parent=parent)

    def _saved(self, lock: Lock) -> None:
        self.moving -= 1
        self._tree.unlock(lock)


def salt_of(req: Any) -> str:
    return "\0".join(filter(None, (req.cache_salt, req.extra_key)))


def past_stores(req: Any) -> bool:
    """Whether a handoff is to be computed and sent whole."""
    params = req.sampling_params.custom_params
    return isinstance(params, dict) and params.get(CACHE_FIELD) is False


def _guarded(step: Callable[[], None]) -> None:
    try:
        step()
    # SGLang's scheduler must not die of one prompt's pages
    except Exception:
        log.exception("a prompt's pages were left alone")
