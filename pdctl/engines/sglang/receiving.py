"""The decode end of one request's handoff, as SGLang's scheduler sees it.

    Bootstrapping     until the sender has reserved and offered the prompt
    WaitingForInput   SGLang may give it blocks, when it has them; `send_metadata` names them
    Transferring      until the last page has landed
    Success           KV, first token and row are all there
    Failed            nothing is written any more: SGLang takes the blocks back at this word,
                      whoever ended the handoff, and not before (R10, U1)

Threads: the scheduler's calls everything that SGLang names; the handoff's own call
`Landing`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVReceiver, KVPoll

from pdctl.engines.ahead import take_ahead
from pdctl.engines.interface import Leg
from pdctl.engines.sglang.exchange import Exchange
from pdctl.engines.sglang.pool import Part
from pdctl.engines.sglang.spec import failure_text
from pdctl.errors import HandoffCancelled, HandoffError, HandoffExpired
from pdctl.handoff.page import Patterns
from pdctl.handoff.seam import Incoming
from pdctl.handoff.sink import Piece, Want
from pdctl.topology.model import PAGE_TOKENS
from pdctl.trace import monotonic_s

log = logging.getLogger("pdctl.engines.sglang")


class DecodeLeg(BaseKVReceiver):  # type: ignore[misc]
    """Made by SGLang's queue of requests that wait for blocks."""

    require_staging = False
    conclude_state = None

    def __init__(self, mgr: Exchange, bootstrap_addr: str, bootstrap_room: int, **_: Any) -> None:
        self.kv_mgr = mgr
        self.bootstrap_infos: tuple[Any, ...] = ()
        self.abort_notified = False
        self.landing: Landing | None = None
        self._room = bootstrap_room
        self._inbound: Incoming | None = None
        self._error: HandoffError | None = None
        self._observed = False
        self._peer = ""

    def begin(self, leg: Leg, token_ids: Sequence[int], salt: str | None = None) -> None:
        """Dials the sender. What is wrong with the leg shows at the next `poll`.

        Args:
            salt: of the prompt's pages in the host's page store; None: nothing comes from there.
        """
        self.landing, self._peer = Landing(self.kv_mgr, leg.room, token_ids, salt), leg.prefill
        try:
            self._inbound = self.kv_mgr.receiver.fetch(leg, token_ids, self.landing)
        except HandoffError as error:
            self.fail(leg, error)

    def fail(self, leg: Leg, error: HandoffError) -> None:
        """The handoff never begins: the next `poll` says so."""
        self._error = error
        self.kv_mgr.report(leg, "decode", error)

    # -- SGLang's scheduler

    def init(self, prefill_dp_rank: int) -> None:
        return

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        **_: Any,
    ) -> None:
        """The request has its blocks, from position `decode_prefix_len` on."""
        if self.landing is not None:
            blocks = [int(block) for block in kv_indices]
            self.landing.place(blocks, decode_prefix_len or 0, aux_index)

    def poll(self) -> int:
        landing = self.landing
        if self._error is not None or (landing is not None and landing.error is not None):
            return int(KVPoll.Failed)
        if landing is None:
            return int(KVPoll.Bootstrapping)
        if landing.committed_at is not None:
            self._observe(landing.committed_at)
            return int(KVPoll.Failed if landing.left else KVPoll.Success)
        if landing.placed:
            return int(KVPoll.Transferring)
        return int(KVPoll.WaitingForInput if landing.expected else KVPoll.Bootstrapping)

    def abort(self) -> None:
        """Asks for the end; `poll` tells when the blocks are free."""
        if self.landing is not None:
            self.landing.leave()
        if self._inbound is not None:
            self._inbound.cancel()

    def clear(self) -> None:
        """SGLang is done with it; where that is before its end, nobody waits for it."""
        if self.landing is not None and self.landing.committed_at is None:
            self.abort()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        return

    def failure_exception(self) -> None:
        error = self._error or (self.landing.error if self.landing is not None else None)
        error = error or HandoffError("the handoff ended")
        raise RuntimeError(failure_text(error.cause, error.message))

    def _observe(self, committed_at: float) -> None:
        if not self._observed:
            self._observed = True
            self.kv_mgr.observe("import", monotonic_s() - committed_at, self._peer)


class Landing:
    """A `DeviceSink`: all positions of a prompt, from the host's page store as far as that has
    them, and the prefill replica's first token."""

    def __init__(
        self, exchange: Exchange, room: int, token_ids: Sequence[int], salt: str | None
    ) -> None:
        self.error: HandoffError | None = None
        """Set once nothing is written any more."""
        self.committed_at: float | None = None
        self.expected = self.placed = False
        self.left = False
        """SGLang has asked for the end, perhaps too late for the handoff."""
        self._exchange = exchange
        self._room = room
        self._token_ids, self._tokens = token_ids, len(token_ids)
        self._salt = salt
        self._answered = threading.Event()
        self._blocks: list[int] = []
        self._held = 0
        self._row: int | None = None

    def place(self, blocks: list[int], held_tokens: int, row: int | None) -> None:
        """Scheduler's thread."""
        self._exchange.pool.fence()
        self._blocks, self._held, self._row = blocks, held_tokens, row
        self.placed = True
        self._answered.set()

    def leave(self) -> None:
        """Scheduler's thread: no blocks will come where none have."""
        self.left = True
        self._answered.set()

    # -- PageSink

    def offered(self, tokens: int, deadline: float) -> Want:
        self.expected = True
        if not self._answered.wait(max(0.0, deadline - monotonic_s())):
            raise HandoffExpired("the decode engine had no free blocks before the deadline")
        if self.left:
            raise HandoffCancelled("the request has ended")
        return Want(tokens=self._tokens, held_tokens=self._taken_ahead(), first_token=True)

    def _taken_ahead(self) -> int:
        store = self._exchange.session.store
        if store is None or self._salt is None:
            return self._held
        return take_ahead(
            *(store, self._token_ids, self._salt),
            held=self._held,
            stop=self._tokens,
            fill=self._fill,
        )

    def _fill(self, pages: Sequence[Patterns], start: int, stop: int) -> None:
        first, last = start // PAGE_TOKENS, stop // PAGE_TOKENS
        begins = self._held // PAGE_TOKENS
        self._exchange.pool.write_pages(self._blocks[first - begins : last - begins], pages[first:])

    def write(self, page: int, first_layer: int, piece: Patterns) -> None:
        self._exchange.pool.write(*self._place_of(page), first_layer, piece)

    def write_from(self, pieces: Sequence[Piece]) -> Callable[[], bool]:
        parts = []
        for piece in pieces:
            first = piece.page - self._held // PAGE_TOKENS
            tokens = min(piece.positions.stop, self._tokens) - piece.positions.start
            parts.append(Part(self._blocks[first : first + piece.pages], tokens, piece))
        return self._exchange.pool.write_from(parts)

    def commit(self, first_token: int | None) -> None:
        assert first_token is not None, "it was asked for"
        self._exchange.pool.flush()
        self._exchange.fill_row(self._row, self._room, first_token, self._tokens)
        self.committed_at = monotonic_s()

    def abort(self, error: HandoffError) -> None:
        try:
            self._exchange.pool.flush()
        finally:
            self.error = error

    def _place_of(self, page: int) -> tuple[int, range]:
        """The page's block, and its slots that are written."""
        slots = range(min(PAGE_TOKENS, self._tokens - page * PAGE_TOKENS))
        return self._blocks[page - self._held // PAGE_TOKENS], slots
