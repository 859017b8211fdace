"""One prompt on the sender: its pages, and what is to be sent next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdctl.errors import HandoffCancelled, HandoffError, ProtocolViolation, TicketRejected
from pdctl.handoff import wire
from pdctl.handoff.budget import Claim
from pdctl.handoff.budgets import Place
from pdctl.handoff.device import Pages, Run
from pdctl.handoff.ends_once import EndsOnce
from pdctl.handoff.lease import Deadline
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.pieces import piece_of
from pdctl.handoff.prompt import Over, Prompt, Step
from pdctl.handoff.schedule import PagePart, Schedule
from pdctl.handoff.state import SENDER_FINAL, Event, Sending


class Peer(Protocol):
    """The connection that serves a room (`serving.py`)."""

    reads: bool
    """Pieces are read out of the pages: the end waits until the receiver has them all."""

    def engage(self, outbound: Outbound) -> None:
        """Called with locks held: it only hands the room to the connection's writer."""
        ...


class Outbound(EndsOnce):
    """One prompt's handoff, on the sender. Thread-safe; no method blocks on the network.

    It ends exactly once: done, failed or cancelled. Calls after that are ignored, but for
    `pages`. `on_reserved` and `on_settled` run on any thread, without locks, and must not
    block.

    Args:
        place: where its pages are to lie; None: in host memory of its own.
    """

    def __init__(
        self,
        prompt: Prompt,
        geometry: PageGeometry,
        deadline: Deadline,
        clock: Callable[[], float],
        *,
        post: Callable[[Callable[[], None]], None],
        settle: Callable[[Outbound], None],
        place: Place | None = None,
    ) -> None:
        super().__init__(prompt.room, deadline, post=post, settle=lambda: settle(self))
        self.prompt = prompt
        self.tokens = prompt.tokens
        """Positions that the prompt has."""
        self.decode = prompt.decode
        """The receiver's name."""
        self.admitted_at = clock()
        self.needed_at: float | None = None
        """When the forward pass of the last position that the grant needs had ended."""
        self.sent_bytes = 0
        self.peer: Peer | None = None
        self.claim: Claim | None = None
        self.on_settled: Callable[[Outbound], None] | None = None
        self.on_granted: Callable[[wire.Grant], None] | None = None
        """Told of the grant, with a lock held: it must neither block nor call back."""
        self._geometry = geometry
        self._clock = clock
        self.on_device = place is not None and place.on_device
        self._reads = None if place is None else place.reads
        self._pages: Pages | None = None
        self._schedule = Schedule(
            geometry,
            prompt.tokens,
            None if place is None else place.piece_bytes,
            together=self.on_device,
        )
        self._computed_at = self.admitted_at
        self._received = 0
        self._placed = 0
        self._taken = 0

    # -- the engine's side ---------------------------------------------------------------

    def pages(self) -> Pages:
        """`[pages, layers, 2, page_tokens, kv_heads, head_dim]`; slots past the prompt are zero, in
        a device's memory once they leave.

        From `on_reserved` until the end. An array that the engine still holds after that is
        its own: it is never given to another prompt.

        Raises:
            HandoffError: the handoff is over, or nothing is reserved yet.
        """
        with self._changed:
            if self._pages is None:
                raise self.error or HandoffCancelled(f"room {self.room} holds no pages")
            return self._pages

    def written(
        self, tokens: int, computed_at: float | None = None, *, layers: int | None = None
    ) -> None:
        """Positions [0, tokens) of layers [0, layers) stand in `pages()`. A number below an
        earlier one, as after a preemption, changes nothing.

        Args:
            computed_at: when their forward pass ended, on the sender's clock; None: now. What
                lies between that and Done is the transfer phase.
            layers: None where it is all of them.

        Raises:
            ValueError: more positions than the prompt has, or more layers than a page.
        """
        if tokens > self.tokens:
            raise ValueError(f"{tokens} positions written, the prompt has {self.tokens}")
        if layers is not None and layers > self._geometry.layers:
            raise ValueError(f"{layers} layers written, a page has {self._geometry.layers}")
        with self._changed:
            if self.over or not self._schedule.write(tokens, layers):
                return
            self._computed_at = self._clock() if computed_at is None else computed_at
            self._progress()

    def begin_last(self) -> bool:
        """Whether the position of the prompt's last token is to be written at all.

        False where the receiver is known not to want it, or the handoff is over. True holds
        each layer of the tail page back until `written(tokens)` of that layer, or `finish`.
        Once per prompt, before the position is written into `pages()`.
        """
        with self._changed:
            if self.over or not self._schedule.wants_last:
                return False
            self._schedule.last_begun = True
            return True

    def skip_last(self) -> None:
        """The position is not written after all, since the grant does not want it."""
        with self._changed:
            if not self.over and not self._schedule.wants_last:
                self._schedule.last_begun = False
                self._changed.notify_all()

    def finish(self, first_token: int) -> None:
        """The prefill has ended; `first_token` travels where the receiver wants it."""
        with self._changed:
            if self.over or self._schedule.finished:
                return
            self._schedule.finished = True
            self._schedule.first_token = first_token
            self._progress()

    # -- the session's side --------------------------------------------------------------

    @property
    def served(self) -> bool:
        return self.peer is not None

    def free(self) -> None:
        self._pages = None

    @property
    def positions(self) -> int:
        """Positions written so far, of every layer."""
        return self._schedule.written

    def admit(self, awaited_by: Peer | None, decode: str) -> None:
        """The room opens, with the receiver that waited for it.

        Raises:
            TicketRejected: the receiver is not the one named.
            HandoffError: it wants the pages in a way that they can't go.
        """
        with self._changed:
            if awaited_by is not None:
                self._take_peer(awaited_by, decode)
            self._machine.on(Event.ADMIT)

    def attach(self, peer: Peer, decode: str) -> None:
        """A receiver said Hello.

        Raises:
            TicketRejected: another has claimed the room, or it is not the one named.
            HandoffError: the room's own, where it is over already; or as `admit` does.
        """
        with self._changed:
            if self.over:
                raise self.error or TicketRejected(f"room {self.room} is over")
            if self.peer is not None:
                raise TicketRejected(f"room {self.room}: the ticket was used before")
            self._take_peer(peer, decode)
            self._changed.notify_all()

    def _take_peer(self, peer: Peer, decode: str) -> None:
        if decode != self.decode:
            raise TicketRejected(f"room {self.room} is for {self.decode}, not {decode}")
        if self._reads not in (None, peer.reads):
            said = "can't be sent, only read" if self._reads else "can't be read, only sent"
            raise HandoffError(
                f"the pages for {decode} {said}",
                hint="both ends of a pair must be started from the same topology",
            )
        self._machine.on(Event.HELLO)
        self.peer = peer
        peer.engage(self)

    def renewed(self, received: int) -> None:
        """The receiver's Renew: more positions received than before are progress (R5)."""
        with self._changed:
            if self.over:
                return
            self._machine.on(Event.RENEW)
            if received > self._received:
                self._received = received
                self._deadline.progressed(self._clock())

    def reserve(self) -> bool:
        """The budget was granted; False where the handoff is over already."""
        with self._changed:
            if self.over:
                return False
            self._machine.on(Event.RESERVE)
            self._pages = self._empty()
            self._progress()
            return True

    def granted(self, grant: wire.Grant) -> None:
        """Raises ProtocolViolation where it asks for what was not offered."""
        with self._changed:
            if self.over:
                return
            self._machine.on(Event.GRANT)
            self._schedule.granted(grant)
            if self.on_granted is not None:
                self.on_granted(grant)
            self._progress()

    def taken(self, pieces: int) -> None:
        """The receiver's Taken. Raises ProtocolViolation where that can't be."""
        with self._changed:
            if self.over:
                return
            self._machine.on(Event.TAKEN)
            if not self._taken < pieces <= self._placed:
                said = f"{pieces} pieces taken, after {self._taken} of {self._placed}"
                raise ProtocolViolation(said)
            self._taken = pieces
            self._progress()

    def step(self) -> Step:
        """Blocks until there is something to send; the deadline ends every wait here."""
        with self._changed:
            while True:
                step = self._decide()
                if step is not None:
                    return step
                self._changed.wait()

    def more_parts(self, most: int) -> list[PagePart]:
        """What can be sent besides, without waiting."""
        parts: list[PagePart] = []
        with self._changed:
            while len(parts) < most and self._machine.state is Sending.GRANTED:
                part = self._schedule.step()
                if not isinstance(part, PagePart):
                    break
                self._take_part(part)
                parts.append(part)
        return parts

    def part_bytes(self, part: PagePart) -> memoryview | Run:
        """Those layers, where they lie. May wait for a device."""
        return piece_of(self.pages(), self._geometry, part)

    # -- inside --------------------------------------------------------------------------

    def _empty(self) -> Pages:
        claim = self.claim
        if claim is None or claim.memory is None:
            return self._geometry.empty(self.tokens)
        memory, claim.memory = claim.memory, None
        return memory if isinstance(memory, Run) else self._geometry.over(memory, self.tokens)

    def _progress(self) -> None:
        now = self._clock()
        self._deadline.progressed(now)
        if self.needed_at is None and self._schedule.needed:
            self.needed_at = self._computed_at
        self._changed.notify_all()

    def _decide(self) -> Step | None:
        state = self._machine.state
        if state in SENDER_FINAL:
            return Over(self.error if self._tell_peer else None)
        if state is Sending.READY:
            self._machine.on(Event.OFFER)
            return wire.Offer(
                tokens=self.tokens,
                token_sha256=self.prompt.token_sha256,
                pages=self._geometry.pages_for(self.tokens),
            )
        if state is not Sending.GRANTED:
            return None
        step = self._schedule.step()
        if isinstance(step, wire.End):
            if self._taken < self._placed:
                return None
            self._machine.on(Event.END)
        elif step is not None:
            self._take_part(step)
        return step

    def _take_part(self, part: PagePart) -> None:
        self._machine.on(Event.PAGES)
        if self.peer is not None and self.peer.reads:
            self._placed += part.pages
        if self._pages is not None and not isinstance(self._pages, Run):
            last = part.first_layer + part.layers
            self._pages[part.page, part.first_layer : last, :, part.slots :] = 0
