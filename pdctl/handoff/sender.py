"""The prefill replica's end: it listens, reserves, and sends pages while they are computed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Unpack

from pdctl.errors import BudgetExceeded, HandoffCancelled, HandoffError
from pdctl.handoff.accepting import accept_each
from pdctl.handoff.arena import Bytes
from pdctl.handoff.budgets import Budgets
from pdctl.handoff.device import DeviceMaker
from pdctl.handoff.ending import Common, ReplicaEnd
from pdctl.handoff.identity import Identity, Leg, Tokens
from pdctl.handoff.lease import Deadline
from pdctl.handoff.link import Link
from pdctl.handoff.outbound import Outbound
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.prompt import Prompt
from pdctl.handoff.pulse import Pulse, guarded
from pdctl.handoff.rooms import Rooms
from pdctl.handoff.serving import Serving, Terms
from pdctl.handoff.ticket import verify
from pdctl.handoff.transport.interface import Connection, Listener

__all__ = ["Outbound", "Sender"]

log = logging.getLogger("pdctl.handoff")

AWAITED_S = 30.0
"""How long a Hello waits for its prompt, at most."""
CLOSE_S = 5.0
GRACE_S = 1.0
MAX_UNPROVED = 64
MAX_CONNECTIONS = 1024


class Sender(ReplicaEnd):
    """Owns the listener, its connections, the budget and every room.

    Threads: one that accepts, one pulse, two per connection; all end with `close`. Any thread
    may call any method.

    Args:
        listen: host and port; port 0 picks one.
        budget_bytes: for the pages of all prompts that are reserved at a time.
        memory: makes all of these at once, page-locked say; None: as they are asked for.
        device: makes as many bytes of a device's memory, for prompts whose receiver reads.
        reads: whether a decode replica does, where there is a `device`.
        common: as `ReplicaEnd` says; `timeout_s` bounds how long a Hello waits for its prompt,
            and `on_failed` is called before the failed handoff's `on_settled`.
    """

    def __init__(
        self,
        identity: Identity,
        geometry: PageGeometry,
        *,
        listen: tuple[str, int],
        budget_bytes: int,
        memory: Callable[[int], Bytes] | None = None,
        device: DeviceMaker | None = None,
        reads: Callable[[str], bool] = lambda decode: True,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(identity, geometry, **common)
        self._address = listen
        self._budgets = Budgets(
            budget_bytes,
            memory=memory,
            device=device,
            reach=self._reach,
            reads=reads,
            changed=self._count_budget,
        )
        self._budget_bytes = budget_bytes
        self._rooms = Rooms()
        awaited_s = min(AWAITED_S, self._timeout_s)
        card = b"" if self._reach is None else self._reach.card()
        self._terms = Terms(identity, self._rooms, awaited_s, self._forget, card)
        self._lock = threading.Lock()
        self._servings: set[Serving] = set()
        self._closing = threading.Event()
        self._board.watch(self._idle_rooms)
        self._listener: Listener | None = None
        self._acceptor = threading.Thread(target=self._accept, name="pdctl-accept", daemon=True)
        self._pulse = Pulse("pdctl-send-pulse", self.check)

    def start(self) -> int:
        """Listens; the bound port. Raises PeerLost where it can't listen there."""
        self._listener = self._transport.listen(self._address)
        self._acceptor.start()
        self._pulse.start()
        return self._listener.port

    def admit(
        self,
        leg: Leg,
        token_ids: Sequence[int] | Tokens,
        *,
        on_reserved: Callable[[Outbound], None],
        on_settled: Callable[[Outbound], None],
    ) -> Outbound:
        """Opens a room for a prompt and asks the budget for its pages. Never blocks.

        Args:
            on_reserved: the pages are there, perhaps before this returns.
            on_settled: the handoff is over; exactly once, unless this raises.

        Raises:
            BudgetExceeded: the prompt can never fit; QueueFull: too many wait.
            TicketRejected: the ticket is forged, expired or spent.
            HandoffExpired: the leg's time is not a positive number of seconds.
            HandoffError: what ended the room before its prompt came.
        """
        if self._closing.is_set():
            raise HandoffCancelled("the sender is closing")
        outbound = self._prepared(leg, Tokens.of(token_ids), on_reserved)
        outbound.on_settled = on_settled
        try:
            self._rooms.admit(outbound, time.time())
        except HandoffError as error:
            self._count(outbound, error)
            raise
        self._board.add(peer=outbound.decode, handoffs_active=1)
        try:
            self._reserve(outbound)
        except HandoffError as error:
            outbound.on_settled = None
            outbound.fail(error)
            # nothing was sent yet: counters and budget are right before the caller knows
            outbound.settle()
            raise
        if self._closing.is_set():
            outbound.fail(HandoffCancelled("the sender is closing"))
        self._pulse.wake()
        return outbound

    def release(self, room: int) -> None:
        """Ends a room's handoff where it is still open: its receiver will not come."""
        for outbound in self._rooms.open():
            if outbound.room == room:
                outbound.cancel()

    def look_again(self) -> None:
        """Memory that an engine had held on to is free now: prompts may wait for it."""
        self._budgets.look_again()

    def close(self) -> None:
        """Ends every handoff as cancelled, every connection and thread; bounded."""
        self._closing.set()
        if self._listener is None:
            self._close_reach()
            return
        self._listener.close()
        self._acceptor.join(CLOSE_S)
        open_rooms = self._rooms.open()
        for outbound in open_rooms:
            outbound.fail(HandoffCancelled("the sender is closing"))
        until = time.monotonic() + GRACE_S
        for outbound in open_rooms:
            outbound.settled.wait(max(0.0, until - time.monotonic()))
        with self._lock:
            servings = list(self._servings)
        for serving in servings:
            serving.unblock()
        until = time.monotonic() + CLOSE_S
        for serving in servings:
            serving.join(max(0.0, until - time.monotonic()))
        self._pulse.stop(CLOSE_S)
        self._close_reach()

    def check(self) -> bool:
        """One beat: deadlines, life, idle connections. True while anything is under way."""
        now = self._clock()
        with self._lock:
            servings = list(self._servings)
        for serving in servings:
            serving.check(now)
        open_rooms = self._rooms.open()
        for outbound in open_rooms:
            outbound.check(now)
        self._budgets.look_again()
        return bool(open_rooms) or any(serving.busy for serving in servings)

    def _idle_rooms(self) -> dict[int, float]:
        now = self._clock()
        return {outbound.room: outbound.idle_s(now) for outbound in self._rooms.open()}

    def _prepared(
        self, leg: Leg, tokens: Tokens, on_reserved: Callable[[Outbound], None]
    ) -> Outbound:
        expires_at_s = verify(
            self._identity.key,
            leg.ticket,
            room=leg.room,
            prefill=self._identity.replica,
            decode=leg.decode,
            digest=self._identity.digest,
            now_s=time.time(),
        )
        prompt = Prompt(
            room=leg.room,
            decode=leg.decode,
            tokens=tokens.count,
            token_sha256=tokens.sha256,
            ticket_expires_at_s=expires_at_s,
        )
        place = self._budgets.place_for(leg.decode)
        outbound = Outbound(
            prompt,
            self._geometry,
            Deadline(leg.timeout_s, self._clock()),
            self._clock,
            post=self._pulse.post,
            settle=self._settle,
            place=place,
        )
        size = self._geometry.pages_for(prompt.tokens) * self._geometry.page_bytes
        claim = place.budget.claim(size, lambda: self._granted(outbound, on_reserved))
        outbound.claim = claim
        return outbound

    def _reserve(self, outbound: Outbound) -> None:
        assert outbound.claim is not None
        try:
            outbound.claim.start()
        except BudgetExceeded as error:
            pages = self._budget_bytes // self._geometry.page_bytes
            longest = pages * self._geometry.page_tokens
            raise BudgetExceeded(
                f"a prompt of {outbound.tokens} tokens does not fit into the buffer of "
                f"{self._identity.replica}; the longest that does has {longest}",
                hint="raise handoff.buffer_bytes",
            ) from error

    def _granted(self, outbound: Outbound, on_reserved: Callable[[Outbound], None]) -> None:
        try:
            if not outbound.reserve():
                return
            self._board.observe("queue", self._clock() - outbound.admitted_at, outbound.decode)
            on_reserved(outbound)
        except MemoryError:
            outbound.fail(HandoffError(f"no memory for {outbound.tokens} positions"))
        # the engine's callback may raise anything: that request fails, others go on (R34)
        except Exception as error:
            log.exception("room=%s on_reserved failed", outbound.room)
            outbound.fail(HandoffError(f"the prefill engine failed: {error!r}"))

    def _settle(self, outbound: Outbound) -> None:
        if outbound.claim is not None:
            guarded(outbound.claim.release)
        self._rooms.close(outbound)
        if outbound.done and outbound.needed_at is not None:
            self._board.observe("transfer", self._clock() - outbound.needed_at, outbound.decode)
        self._count(outbound, outbound.error, handoffs_active=-1)
        outbound.settled.set()
        if outbound.on_settled is not None:
            told = outbound.on_settled
            guarded(lambda: told(outbound))

    def _count(self, outbound: Outbound, error: HandoffError | None, **more: int) -> None:
        amounts = {"gpu_bytes" if outbound.on_device else "host_bytes": outbound.sent_bytes, **more}
        self._count_end(outbound.room, outbound.decode, error, **amounts)

    def _count_budget(self, used: int, waiters: int) -> None:
        self._board.gauge(buffer_bytes_used=used, waiters=waiters)

    def _accept(self) -> None:
        assert self._listener is not None
        accept_each(self._listener, self._closing, self._welcome)

    def _welcome(self, connection: Connection) -> None:
        serving = Serving(Link(connection, self._geometry, self._clock), self._terms)
        with self._lock:
            unproved = sum(not each.proved for each in self._servings)
            full = unproved >= MAX_UNPROVED or len(self._servings) >= MAX_CONNECTIONS
            if not full and not self._closing.is_set():
                self._servings.add(serving)
                serving.start()
                self._pulse.wake()
                return
        connection.unblock()
        connection.close()

    def _forget(self, serving: Serving) -> None:
        with self._lock:
            self._servings.discard(serving)
