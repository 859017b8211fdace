"""The end of the page store inside an engine's process: `interface.PageStore`."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial

from pdctl.handoff.arena import Bytes
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.page import PageGeometry, Patterns
from pdctl.handoff.store import frames
from pdctl.handoff.store.attached import (
    REDIAL_FIRST_S,
    REDIAL_MOST_S,
    Attached,
    StoreLost,
    attach,
)
from pdctl.handoff.store.errands import Errands
from pdctl.handoff.store.interface import HOLD_S, Loan, StoreSeat
from pdctl.handoff.store.keys import PromptKeys, Space, prompt_keys
from pdctl.handoff.store.loans import MISS, PinnedLoan
from pdctl.topology.contract import Contract
from pdctl.trace import monotonic_s

log = logging.getLogger("pdctl.store")

CLOSE_S = 1.0
HOLDING_THREADS = 4
MAX_WAITING_BYTES = 256 << 20
"""Pages that wait to be published; past that, an engine's are not taken."""


class StoreClient:
    """Dials on a thread of its own from its construction on, and again whenever the store went
    away; meanwhile every question is a miss.

    Args:
        lock: has a GPU read memory where it lies, for as long as that array lives. Raises
            MemoryError.
    """

    def __init__(
        self,
        seat: StoreSeat,
        *,
        contract: Contract,
        board: CounterBoard,
        lock: Callable[[Bytes], None] | None = None,
    ) -> None:
        self._path = seat.socket
        self._contract = contract.digest
        self._geometry = PageGeometry.of(contract)
        self._board = board
        self._lock_pages = lock
        self._attached: Attached | None = None
        self._changed = threading.Condition()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._closed = threading.Event()
        self._holding = Errands("pdctl-store-hold", HOLDING_THREADS)
        self._publishing = Errands("pdctl-store-publish")
        self._thread = threading.Thread(target=self._keep, name="pdctl-store", daemon=True)
        self._thread.start()

    def settled(self, connected: bool, timeout_s: float) -> bool:
        """Waits until its store is there, or away; False where it was not in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: (self._attached is not None) == connected, timeout_s
            )

    def prompt(self, token_ids: Sequence[int], salt: str = "") -> PromptKeys:
        space = Space(contract=self._contract, salt=salt)
        return prompt_keys(token_ids, space, self._geometry.page_tokens)

    # -- taking

    def hold(self, prompt: PromptKeys, timeout_s: float = HOLD_S) -> Loan:
        until_s = monotonic_s() + timeout_s
        loan = self._lend(prompt.pages, until_s, others=True)
        if loan is None:
            self._board.add(missed_pages=len(prompt.pages))
            return MISS
        rest = prompt.tokens - loan.tokens
        # a first page's tail spares less than to look for it costs
        if rest and (loan.keys or not prompt.pages):
            loan.extend_by_tail(prompt, until_s)
        self._board.add(missed_pages=max(0, len(prompt.pages) - len(loan.keys)))
        return loan

    def hold_soon(
        self, prompt: PromptKeys, told: Callable[[Loan], None], timeout_s: float = HOLD_S
    ) -> None:
        until_s = monotonic_s() + timeout_s

        def errand() -> None:
            left_s = until_s - monotonic_s()
            told(self.hold(prompt, left_s) if left_s > 0 else MISS)

        self._holding.run(errand)

    def borrow(self, keys: Sequence[bytes], timeout_s: float = HOLD_S) -> Loan:
        loan = self._lend(keys, monotonic_s() + timeout_s, others=False)
        self._board.add(missed_pages=len(keys) - (len(loan.keys) if loan else 0))
        return loan or MISS

    def held(self, keys: Sequence[bytes], timeout_s: float = HOLD_S) -> int:
        attached, until_s, found = self._attached, monotonic_s() + timeout_s, 0
        if attached is None:
            return 0
        try:
            for _, batch in frames.batches(keys):
                left_s = max(0.0, until_s - monotonic_s())
                answer = attached.ask(frames.Held(keys=batch), frames.Counted, left_s)
                found += answer.pages if answer is not None else 0
                if answer is None or answer.pages < len(batch):
                    break
        except StoreLost as error:
            log.debug("%s", error)
        return found

    def _lend(self, keys: Sequence[bytes], until_s: float, *, others: bool) -> PinnedLoan | None:
        """Leading keys as a loan, which may be empty; None where there is no store."""
        attached, lease = self._attached, None
        slots: tuple[int, ...] = ()
        if attached is None or self._closed.is_set():
            return None
        try:
            for at, batch in frames.batches(keys) if keys else ((0, ()),):
                left_s = max(0.0, until_s - monotonic_s())
                request = frames.Hold(
                    keys=batch,
                    timeout_s=left_s,
                    others=others,
                    lease=lease,
                    parent=keys[at - 1] if at else None,
                )
                lent = attached.ask(request, frames.Lent, left_s)
                if lent is None:
                    break
                lease, slots = lent.lease, (*slots, *lent.slots)
                if len(lent.slots) < len(batch):
                    break
        except StoreLost as error:
            log.debug("%s", error)
        if lease is None:
            return None
        return PinnedLoan(
            attached, lease, tuple(keys[: len(slots)]), slots, self._board, self._holding.run
        )

    # -- giving

    def publish(
        self,
        keys: Sequence[bytes],
        write: Callable[[int, Patterns], None],
        *,
        parent: bytes | None = None,
        timeout_s: float = HOLD_S,
    ) -> int:
        attached, written = self._attached, 0
        if attached is None:
            return 0
        try:
            for at, batch in frames.batches(keys):
                request = frames.Reserve(keys=batch, parent=keys[at - 1] if at else parent)
                granted = attached.ask(request, frames.Granted, timeout_s)
                if granted is None:
                    break
                self._board.add(evicted_pages=granted.evicted)
                stored = self._fill(attached, batch, granted, partial(_shifted, write, at))
                if stored is None:
                    break
                written += stored
        except StoreLost as error:
            log.debug("%s", error)
        self._board.add(stored_pages=written, shared_bytes=written * self._geometry.page_bytes)
        return written

    def _fill(
        self,
        attached: Attached,
        keys: Sequence[bytes],
        granted: frames.Granted,
        write: Callable[[int, Patterns], None],
    ) -> int | None:
        """Writes what was granted; None where that, or its commit, failed."""
        done: list[bytes] = []
        try:
            for each in granted.wanted:
                write(each.place, attached.memory.page(each.slot, writable=True))
            done = [keys[each.place] for each in granted.wanted]
        # the engine's own; what it did not write is not stored, and it goes on (R35)
        except Exception:
            log.exception("pages could not be written")
        commit = frames.Commit(lease=granted.lease, keys=tuple(done))
        answer = attached.ask(commit, frames.Answered)
        complete = len(done) == len(granted.wanted)
        return len(done) if complete and answer is not None and answer.ok else None

    def publish_soon(
        self,
        keys: Sequence[bytes],
        pages: Sequence[Patterns] | Patterns,
        *,
        parent: bytes | None = None,
    ) -> bool:
        size = sum(page.nbytes for page in pages)
        with self._lock:
            full = self._waiting_bytes and self._waiting_bytes + size > MAX_WAITING_BYTES
            if full or self._attached is None:
                return False
            self._waiting_bytes += size

        def write(place: int, page: Patterns) -> None:
            tokens = pages[place].shape[2]
            page[:, :, :tokens] = pages[place]
            page[:, :, tokens:] = 0

        def errand() -> None:
            try:
                self.publish(keys, write, parent=parent)
            finally:
                with self._lock:
                    self._waiting_bytes -= size

        self._publishing.run(errand)
        return True

    # -- life

    def close(self) -> None:
        self._closed.set()
        self._publishing.close(CLOSE_S)
        self._holding.close(CLOSE_S)
        attached = self._attached
        if attached is not None:
            attached.close()
        self._thread.join(CLOSE_S)

    def _keep(self) -> None:
        pause_s = 0.0
        while not self._closed.wait(pause_s * random.uniform(0.5, 1.0)):
            try:
                attached = attach(self._path, self._contract, self._geometry, self._lock_pages)
            except StoreLost as error:
                log.debug("no store at %s: %s", self._path, error)
                pause_s = min(REDIAL_MOST_S, max(REDIAL_FIRST_S, 2 * pause_s))
                continue
            pause_s = REDIAL_FIRST_S
            self._turn(attached)
            log.info("the page store at %s is there", self._path)
            if self._closed.is_set():
                attached.close()
            attached.wait()
            self._turn(None)
            # its memory goes with its last loan, not with the next store
            del attached
            if not self._closed.is_set():
                log.warning("the page store went away: every prompt is computed until it is back")

    def _turn(self, attached: Attached | None) -> None:
        with self._changed:
            self._attached = attached
            self._changed.notify_all()


def _shifted(
    write: Callable[[int, Patterns], None], places: int, place: int, page: Patterns
) -> None:
    write(places + place, page)
