"""The two ends of one request's handoff, beside vLLM's blocks.

Threads: vLLM's worker thread runs the steps; the handoff's own threads call the sink and the
outbound's callbacks. Nothing here blocks the worker thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from pdctl.engines.interface import Leg
from pdctl.engines.vllm.inlet import Inlet
from pdctl.engines.vllm.interface import Blocks, Span
from pdctl.errors import HandoffCancelled, HandoffError, HandoffExpired
from pdctl.handoff.page import Patterns
from pdctl.handoff.seam import Incoming, Outgoing, ReceivingEnd, SendingEnd
from pdctl.handoff.sink import Piece, Want
from pdctl.topology.model import PAGE_TOKENS
from pdctl.trace import monotonic_s

log = logging.getLogger("pdctl.engines.vllm")


class Desk(Protocol):
    """Where legs tell the worker's half, from any thread, what the scheduler must know."""

    def reserved(self, request_id: str) -> None: ...

    def offered(self, request_id: str) -> None: ...

    def failed(self, request_id: str) -> None:
        """Before the request had blocks for it."""
        ...

    def loaded(self, request_id: str, lost: Sequence[int]) -> None:
        """Nothing is written any more; `lost` blocks do not hold what they should. Exactly
        once for each request that was given blocks to be filled (U1)."""
        ...

    def observe(self, phase: str, seconds: float, peer: str) -> None: ...


class PrefillLeg:
    """Sends a prompt's positions, layer by layer, out of each step that computes some."""

    def __init__(self, request_id: str, desk: Desk, tokens: int) -> None:
        self._request_id = request_id
        self._desk = desk
        self._tokens = tokens
        self._outbound: Outgoing | None = None
        self._peer = ""
        self._reserved_at: float | None = None
        self._held = 0
        """High-water mark: positions that are in the pages, whatever vLLM recomputes."""

    def start(self, sender: SendingEnd, leg: Leg, token_ids: Sequence[int]) -> None:
        """Worker thread. Raises what `Sender.admit` raises: nothing is reserved then."""
        self._peer = leg.decode
        self._outbound = sender.admit(
            leg, token_ids, on_reserved=self._on_reserved, on_settled=self._on_settled
        )

    def span(self, blocks: Sequence[int], positions: int) -> Span | None:
        """Worker thread, before a forward after which `positions` of the prompt stand in
        `blocks`: those that are not in the pages yet, or None."""
        outbound = self._outbound
        if outbound is None or positions <= self._held:
            return None
        ends = positions == self._tokens
        stop = positions - 1 if ends and not outbound.begin_last() else positions
        try:
            return Span(blocks, self._held, stop, outbound.pages()) if stop > self._held else None
        except HandoffError as error:
            log.debug("room=%s nothing more is exported: %s", outbound.room, error)
            return None

    def landed(self, span: Span, layers: int) -> None:
        """Any thread: the span stands in the pages, of the first `layers` layers."""
        if self._outbound is not None:
            self._outbound.written(span.stop, layers=layers)

    def taken(self, span: Span) -> None:
        """Worker thread, after the forward: every layer of the span is copied, or will be soon."""
        self._held = span.stop

    def computed(self, positions: int) -> None:
        """Worker thread, after the forward."""
        if positions == self._tokens and self._reserved_at is not None:
            self._desk.observe("prefill", monotonic_s() - self._reserved_at, self._peer)
            self._reserved_at = None

    def finish(self, first_token: int | None) -> None:
        """Worker thread: the request has ended in the engine."""
        if self._outbound is None:
            return
        if first_token is None:
            self._outbound.cancel()
        else:
            self._outbound.finish(first_token)

    def broke(self, error: BaseException) -> None:
        """Worker thread: the pages can't be filled."""
        if self._outbound is not None:
            self._outbound.fail(HandoffError(f"the prefill engine failed: {error!r}"))

    def deprive(self) -> None:
        """Any thread: vLLM was promised pages of the store that are not there."""
        if self._outbound is not None:
            said = "the page store went away while its pages were being loaded"
            self._outbound.fail(HandoffError(said))

    def _on_reserved(self, outbound: Outgoing) -> None:
        self._reserved_at = monotonic_s()
        self._desk.reserved(self._request_id)

    def _on_settled(self, outbound: Outgoing) -> None:
        if outbound.error is not None:
            self._desk.failed(self._request_id)


class DecodeLeg:
    """A `DeviceSink`: fills the first n-1 positions of a request's blocks, from the host's page
    store as far as that has them.

    Given blocks, it ends in exactly one `Desk.loaded`; never given any, in `Desk.failed`.
    """

    def __init__(
        self,
        request_id: str,
        desk: Desk,
        blocks: Blocks,
        *,
        inlet: Inlet | None = None,
        salt: str = "",
    ) -> None:
        """`inlet` None: nothing is taken from a store."""
        self._request_id = request_id
        self._desk = desk
        self._memory = blocks
        self._inlet = inlet
        self._salt = salt
        self._token_ids: Sequence[int] = ()
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._inbound: Incoming | None = None
        self._blocks: list[int] = []
        self._private: list[int] = []
        self._held = self._positions = 0
        self._placed = self._cancelled = self._over = False
        self.peer = ""
        self.committed_at: float | None = None

    def start(self, receiver: ReceivingEnd, leg: Leg, token_ids: Sequence[int]) -> None:
        """Worker thread. Raises what `Receiver.fetch` raises."""
        self.peer = leg.prefill
        self._token_ids = token_ids
        self._positions = len(token_ids) - 1
        self._inbound = receiver.fetch(leg, token_ids, self)

    def place(self, blocks: list[int], held_tokens: int, private: list[int]) -> None:
        """Worker thread: the request has blocks; `private` is empty where it needs nothing."""
        with self._lock:
            self._blocks, self._private, self._held = blocks, private, held_tokens
            self._placed = True
            over = self._over
        if over and private:
            self._desk.loaded(self._request_id, private)
        self._answered.set()

    def finish(self, *, aborted: bool) -> None:
        """Worker thread: the request has ended in the engine. One that held all it needed may
        have been answered before the sender's Done: its handoff goes on to its own end."""
        if not aborted:
            return
        self._cancelled = True
        if self._inbound is not None:
            self._inbound.cancel()
        self._answered.set()

    # -- PageSink

    def offered(self, tokens: int, deadline: float) -> Want:
        self._desk.offered(self._request_id)
        if not self._answered.wait(max(0.0, deadline - monotonic_s())):
            raise HandoffExpired("the decode engine had no free blocks before the deadline")
        if self._cancelled:
            raise HandoffCancelled("the request has ended")
        if self._inlet is not None and self._private:
            self._held = self._inlet.take_ahead(
                *(self._token_ids, self._salt, self._blocks, self._held, self._positions)
            )
        return Want(tokens=self._positions, held_tokens=self._held)

    def write(self, page: int, first_layer: int, piece: Patterns) -> None:
        if at := self._wanted(range(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)):
            self._memory.write(self._blocks, at.start, at.stop, first_layer, piece)

    def write_from(self, pieces: Sequence[Piece]) -> Callable[[], bool]:
        parts = [(at, piece) for piece in pieces if (at := self._wanted(piece.positions))]
        return self._memory.write_from(self._blocks, parts) if parts else lambda: True

    def commit(self, first_token: int | None) -> None:
        self._memory.flush()
        with self._lock:
            self._over = True
        self.committed_at = monotonic_s()
        if self._private:
            self._desk.loaded(self._request_id, ())

    def abort(self, error: HandoffError) -> None:
        with self._lock:
            self._over = True
            placed, private = self._placed, self._private
        try:
            self._memory.flush()
        finally:
            if private:
                self._desk.loaded(self._request_id, private)
            elif not placed:
                self._desk.failed(self._request_id)

    def _wanted(self, positions: range) -> range:
        """Those of them that are placed."""
        return range(max(positions.start, self._held), min(positions.stop, self._positions))
