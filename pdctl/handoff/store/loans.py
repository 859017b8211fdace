"""Pages that a client has borrowed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.page import Patterns
from pdctl.handoff.store import frames
from pdctl.handoff.store.attached import Attached, StoreLost
from pdctl.handoff.store.keys import PromptKeys
from pdctl.topology.model import PAGE_TOKENS
from pdctl.trace import monotonic_s

log = logging.getLogger("pdctl.store")


class Miss:
    """The loan of nothing."""

    tokens = 0
    keys: tuple[bytes, ...] = ()
    pages: Sequence[Patterns] = ()

    def release(self, used_tokens: int = 0) -> bool:
        return True


MISS = Miss()


class PinnedLoan:
    """As `interface.Loan`; `extend_by_tail` only before anybody else has it.

    Args:
        later: runs what it is given on another thread.
    """

    def __init__(
        self,
        attached: Attached,
        lease: int,
        keys: tuple[bytes, ...],
        slots: tuple[int, ...],
        board: CounterBoard,
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self.keys = keys
        self.tokens = len(keys) * PAGE_TOKENS
        self._attached = attached
        self._lease = lease
        self._slots = slots
        self._board = board
        self._later = later
        self._lock = threading.Lock()
        self._released = False

    @property
    def pages(self) -> Sequence[Patterns]:
        return [self._attached.memory.page(slot) for slot in self._slots]

    def extend_by_tail(self, prompt: PromptKeys, until_s: float) -> None:
        """The longest partial tail that is held where the full pages end."""
        tails = prompt.tails(len(self.keys))
        keys = tuple(sorted(tails, key=lambda key: -tails[key]))
        left_s = max(0.0, until_s - monotonic_s())
        parent = self.keys[-1] if self.keys else None
        request = frames.Tail(lease=self._lease, keys=keys, timeout_s=left_s, parent=parent)
        try:
            lent = self._attached.ask(request, frames.Lent, left_s)
        except StoreLost as error:
            log.debug("%s", error)
            return
        if lent is not None and lent.slots:
            key = keys[lent.place]
            self.keys += (key,)
            self._slots += lent.slots
            self.tokens += tails[key]

    def release(self, used_tokens: int = 0) -> bool:
        with self._lock:
            first, self._released = not self._released, True
        if not first:
            return True
        # nobody writes where it was read while the store lives, nor once it is dead
        if self._attached.lost:
            return False
        if used_tokens:
            used = -(-used_tokens // PAGE_TOKENS)
            size = self._attached.memory.page_bytes
            self._board.add(read_pages=used, reused_tokens=used_tokens, shared_bytes=used * size)
        self._later(self._tell)
        return True

    def _tell(self) -> None:
        """Again and again where the store is slow: what it does not hear of stays pinned."""
        try:
            request = frames.Release(lease=self._lease)
            self._attached.ask(request, frames.Answered, silent_too=True)
        except StoreLost as error:
            log.debug("%s", error)
            if not self._attached.lost:
                self._later(self._tell)
