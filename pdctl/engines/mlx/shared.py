"""A computed prompt's use of its host's page store: what is held there is not computed, and what
was computed is put there. On prefill replicas beside the handoff."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from pdctl.engines.mlx.call import Call
from pdctl.engines.mlx.exporter import MLX_DTYPES, read_positions
from pdctl.engines.mlx.importer import ImportedCache
from pdctl.handoff.store.interface import HOLD_S, Loan, PageStore
from pdctl.topology.model import PAGE_TOKENS
from pdctl.trace import monotonic_s

if TYPE_CHECKING:
    from pdctl.engines.mlx.loop import EngineLoop

log = logging.getLogger("pdctl.engines.mlx")


class SharedPrefix:
    """A call's pages in the store. A failure of any kind leaves a prompt that is computed."""

    def __init__(self, engine: EngineLoop, call: Call, store: PageStore) -> None:
        self._engine = engine
        self._call = call
        self._store = store
        self._prompt = store.prompt(call.prompt.tokens, call.salt)
        self._granted = threading.Event()
        self._lock = threading.Lock()
        self._inserted = False
        self._keys = self._prompt.stored()
        self._stored = 0
        """Leading pages that the store has, or was given."""
        self._gave_up = False
        self.positions = 0
        self.memory: ImportedCache | None = None
        """What was taken from the store: `positions` of them."""

    def start(self) -> None:
        """HTTP thread: takes what is there, then hands the call to the batch."""
        until_s = monotonic_s() + HOLD_S
        loan = self._store.hold(self._prompt, HOLD_S)
        self.positions = min(loan.tokens, len(self._call.prompt.tokens) - 1)
        self._stored = (
            len(loan.keys) if loan.tokens >= self._prompt.tokens else (loan.tokens // PAGE_TOKENS)
        )
        try:
            taken = self.positions >= PAGE_TOKENS and self._take(loan, until_s)
        # whatever is wrong with shared pages, the prompt can be computed
        except Exception:
            log.exception("pages of the store could not be taken")
            taken = False
        if not loan.release(self.positions if taken else 0) or not taken:
            self._engine.slots.give_back(self)
        self._insert()

    def _insert(self) -> None:
        with self._lock:
            first, self._inserted = not self._inserted, True
        if first:
            self._engine.insert(self._call)

    def _take(self, loan: Loan, until_s: float) -> bool:
        self._engine.slots.ask(self)
        if not self._granted.wait(max(0.0, until_s - monotonic_s())) or self._call.ended:
            return False
        memory = self.memory
        if memory is None:
            return False
        for place, page in enumerate(loan.pages):
            if place * PAGE_TOKENS < self.positions:
                memory.write(place, 0, page)
        return True

    def wants_memory(self) -> bool:
        """Loop's thread: whether the store has a page or more of the prompt that this replica
        does not keep itself; to compute less costs less than to copy all of it."""
        return self._engine.kept_positions(self._call) + PAGE_TOKENS <= self.positions

    def grant(self, memory: ImportedCache | None, refusal: Exception | None = None) -> None:
        """Loop's thread. A call that needs no copy joins the batch in this turn of the loop: one
        with another prompt in it may take seconds."""
        if refusal is not None:
            log.warning("no memory for %d shared positions: %s", self.positions, refusal)
        self.memory = memory
        if memory is None:
            self._insert()
        self._granted.set()

    def computed(self, caches: list[Any], row: int, positions: int) -> None:
        """Loop's thread, after a step: `positions` of the prompt stand in the caches."""
        if self._gave_up:
            return
        try:
            self._publish(caches, row, positions)
        # the answer goes on; the rest of the prompt is not stored (R35)
        except Exception:
            log.exception("a prompt could not be stored")
            self._gave_up = True

    def _publish(self, caches: list[Any], row: int, positions: int) -> None:
        """Copies the pages that are complete and not in the store, at the end the tail too;
        another thread puts them there."""
        keys, count = self._keys, len(self._call.prompt.tokens)
        stop = len(keys) if positions >= count else positions // PAGE_TOKENS
        if stop <= self._stored:
            return
        start, end = self._stored * PAGE_TOKENS, min(count, stop * PAGE_TOKENS)
        dtype = MLX_DTYPES[self._engine.contract.dtype]
        piece = read_positions(caches, row, start, end, dtype)
        pages = [piece[:, :, at : at + PAGE_TOKENS] for at in range(0, end - start, PAGE_TOKENS)]
        parent = keys[self._stored - 1] if self._stored else None
        self._gave_up = not self._store.publish_soon(
            keys[self._stored : stop], pages, parent=parent
        )
        self._stored = stop

    def release(self, error: BaseException | None) -> None:
        self._engine.slots.give_back(self)
        self._granted.set()
