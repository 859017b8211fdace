"""The prefill end of one request's handoff, as SGLang's scheduler sees it.

    Bootstrapping     until the pages of the whole prompt are reserved
    WaitingForInput   prefill may compute; each chunk goes through `send`
    Transferring      all of it was given to `send`
    Success, Failed   the receiver has committed; or nothing more is read from the blocks

On a CPU chunks are copied once SGLang has computed them and says `send`. On a GPU they leave
layer by layer while they are computed (`stepping.py`): then `send` tells the first token alone.

Threads: the scheduler's calls everything that SGLang names, `span`, `taken` and `broke`; the
exporter's copies; copies on a GPU call `landed`; the handoff's own call `_on_reserved` and
`_on_settled`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import BaseKVSender, KVPoll, KVTransferMetric

from pdctl.engines.interface import Leg
from pdctl.engines.sglang.exchange import Exchange
from pdctl.engines.sglang.spec import failure_text
from pdctl.errors import HandoffError
from pdctl.handoff.seam import Outgoing
from pdctl.topology.model import PAGE_TOKENS
from pdctl.trace import monotonic_s

if TYPE_CHECKING:
    from pdctl.engines.sglang.cuda import Span

log = logging.getLogger("pdctl.engines.sglang")

PART_BYTES = 4 << 20
"""Of pages copied at a time, one page at least: an abort holds the scheduler for no longer than
one such copy, a few milliseconds on a CPU."""


class PrefillLeg(BaseKVSender):  # type: ignore[misc]
    """Made by SGLang's bootstrap queue, whose arguments differ from version to version."""

    def __init__(self, mgr: Exchange, bootstrap_addr: str, bootstrap_room: int, **_: Any) -> None:
        self.kv_mgr = mgr
        self._room = bootstrap_room
        self._outbound: Outgoing | None = None
        self._tokens = 0
        self._peer = ""
        self._reserved_at: float | None = None
        self._error: HandoffError | None = None
        self._settled = False
        self._copying = threading.Lock()
        self._abandoned = False
        self._blocks = self._given = 0
        self._stepped = 0
        """Positions that steps have computed, and brought out as far as they are wanted."""
        self._held = 0
        """Positions that are in the pages, or will be soon, by way of steps."""
        self._row: int | None = None

    def begin(self, leg: Leg, token_ids: Sequence[int]) -> None:
        """Opens the room. What is wrong with it shows at the next `poll`."""
        self._tokens, self._peer = len(token_ids), leg.decode
        try:
            self._outbound = self.kv_mgr.sender.admit(
                leg, token_ids, on_reserved=self._on_reserved, on_settled=self._on_settled
            )
        except HandoffError as error:
            self.fail(leg, error)

    def fail(self, leg: Leg, error: HandoffError) -> None:
        """The handoff never begins: the next `poll` says so."""
        self._error = error
        self.kv_mgr.report(leg, "prefill", error)

    # -- SGLang's scheduler

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._blocks, self._row = num_kv_indices, aux_index

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: Any = None) -> None:
        """The next blocks of the prompt are computed; with the last one, the first token is."""
        computed_at = monotonic_s()
        blocks = [int(block) for block in kv_indices]
        first = self._given
        self._given += len(blocks)
        token = self.kv_mgr.first_token(self._row) if self._given >= self._blocks else None
        if token is not None and self._reserved_at is not None:
            self.kv_mgr.observe("prefill", computed_at - self._reserved_at, self._peer)
        if self._outbound is not None and self._stepped >= self._stop(self._given):
            if token is not None:
                self._outbound.finish(token)
            return
        self.kv_mgr.exporter.put(lambda: self._export(first, blocks, token, computed_at))

    def poll(self) -> int:
        if self._error is not None or (self._settled and not self._done):
            return int(KVPoll.Failed)
        if self._settled:
            return int(KVPoll.Success)
        if self._reserved_at is None:
            return int(KVPoll.Bootstrapping)
        given = 0 < self._blocks <= self._given
        return int(KVPoll.Transferring if given else KVPoll.WaitingForInput)

    def abort(self) -> None:
        """SGLang takes the blocks back when this has returned: it waits for the part of a copy
        that the exporter has under way, and no other begins. What steps have enqueued on a GPU
        comes before the next step there."""
        if self._outbound is not None:
            self._outbound.cancel()
        self._abandoned = True
        with self._copying:
            pass

    def clear(self) -> None:
        return

    # -- its steps, on a GPU

    def span(self, row: int, positions: int) -> Span | None:
        """Before a step after which `positions` of the prompt stand in the slots that SGLang's
        table names in that row: those that are not in the pages yet, or None."""
        from pdctl.engines.sglang.cuda import Span

        outbound = self._outbound
        if outbound is None or self._abandoned or positions <= self._held:
            return None
        ends = positions == self._tokens
        stop = positions - 1 if ends and not outbound.begin_last() else positions
        self._stepped = positions
        try:
            return Span(row, self._held, stop, outbound.pages()) if stop > self._held else None
        except HandoffError as error:
            log.debug("room=%s nothing more is exported: %s", self._room, error)
            return None

    def landed(self, span: Span, layers: int) -> None:
        """Any thread: the span stands in the pages, of the first `layers` layers."""
        if self._outbound is not None:
            self._outbound.written(span.stop, layers=layers)

    def taken(self, span: Span) -> None:
        """Every layer of the span is copied, or will be soon."""
        self._held = span.stop

    def broke(self, error: BaseException) -> None:
        """The pages can't be filled."""
        if self._outbound is not None:
            self._outbound.fail(HandoffError(f"the prefill engine failed: {error!r}"))

    def failure_exception(self) -> None:
        error = self._error or (self._outbound.error if self._outbound is not None else None)
        error = error or HandoffError("the handoff ended")
        raise RuntimeError(failure_text(error.cause, error.message))

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric()

    def mark_prefill_complete(self) -> None:
        return

    # -- inside

    def _stop(self, blocks: int) -> int:
        """Positions of the prompt in its first blocks."""
        return min(blocks * PAGE_TOKENS, self._tokens)

    @property
    def _done(self) -> bool:
        return self._outbound is not None and self._outbound.done

    def _export(self, first: int, blocks: list[int], token: int | None, computed_at: float) -> None:
        outbound = self._outbound
        if outbound is None:
            return
        try:
            step = max(1, PART_BYTES // self.kv_mgr.pool.page_bytes)
            for at in range(0, len(blocks), step):
                part = blocks[at : at + step]
                last = token is not None and at + step >= len(blocks)
                self._copy(outbound, first + at, part, last, computed_at)
            if token is not None:
                outbound.finish(token)
        except HandoffError as error:
            log.debug("room=%s nothing more is exported: %s", self._room, error)
        # a copy that fails ends that handoff; the engine and the others go on (R34)
        except Exception as error:
            log.exception("room=%s the export failed", self._room)
            outbound.fail(HandoffError(f"the prefill engine failed: {error!r}"))

    def _copy(
        self, outbound: Outgoing, first: int, blocks: list[int], last: bool, computed_at: float
    ) -> None:
        stop = self._stop(first + len(blocks))
        if not last:
            self._read(outbound, first, blocks, stop, computed_at)
            return
        # the tail's page may leave without the prompt's last position, while that is copied
        self._read(outbound, first, blocks, stop - 1, computed_at)
        if outbound.begin_last():
            self._read(outbound, first + len(blocks) - 1, blocks[-1:], stop, computed_at)

    def _read(
        self, outbound: Outgoing, first: int, blocks: list[int], stop: int, computed_at: float
    ) -> None:
        with self._copying:
            if self._abandoned:
                return
            slots = stop - (first + len(blocks) - 1) * PAGE_TOKENS
            self.kv_mgr.pool.read(blocks, first, slots, outbound.pages())
        outbound.written(stop, computed_at)

    def _on_reserved(self, outbound: Outgoing) -> None:
        self._reserved_at = monotonic_s()

    def _on_settled(self, outbound: Outgoing) -> None:
        self._settled = True
