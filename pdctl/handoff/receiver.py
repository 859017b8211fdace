"""The decode replica's end: it dials, grants, and hands pages to its engine as they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Unpack

from pdctl.errors import HandoffCancelled, HandoffError, PeerLost
from pdctl.handoff.arena import Bytes
from pdctl.handoff.device import DeviceMaker, Run
from pdctl.handoff.ending import Common, ReplicaEnd
from pdctl.handoff.handshake import answer
from pdctl.handoff.identity import Identity, Leg, Tokens
from pdctl.handoff.idle import IdleLinks
from pdctl.handoff.inbound import Inbound, Services
from pdctl.handoff.link import Link
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.pulls import DevicePulls, HostPulls
from pdctl.handoff.pulse import Pulse
from pdctl.handoff.reading import Reading
from pdctl.handoff.sink import HELD_PIECES, PageSink, Want
from pdctl.handoff.slots import Slots, device_slots, host_slots
from pdctl.handoff.transport.reach import Reach
from pdctl.handoff.transport.tcp import parse_address

__all__ = ["Inbound", "PageSink", "Receiver", "Want"]

DIAL_S = 5.0
CLOSE_S = 5.0


class Receiver(ReplicaEnd):
    """Owns the connections to senders and every handoff that it fetches.

    Threads: one pulse, and per handoff one that reads and, briefly, one that allocates; all
    end with `close`. Any thread may call any method.

    Args:
        memory: makes what pieces are received into, page-locked say; None: ordinary memory.
        reads: whether a prefill replica's memory is read, where there is a `reach`; else its
            pieces come over the connection.
        held_pieces: how many of a connection's last pieces stay as they were in such memory.
        device: makes what is read into, where the sender's memory is a device's; then sinks are
            `DeviceSink`s.
        common: as `ReplicaEnd` says; `timeout_s` is the default of legs, each brings its own,
            and `on_failed` is called before the failed handoff's `sink.abort`.
    """

    def __init__(
        self,
        identity: Identity,
        geometry: PageGeometry,
        *,
        memory: Callable[[int], Bytes] | None = None,
        reads: Callable[[str], bool] = lambda prefill: True,
        held_pieces: int = HELD_PIECES,
        device: DeviceMaker | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(identity, geometry, **common)
        self._memory = memory
        self._reads = reads
        self._slots: Slots[memoryview] | None = None
        self._device_slots: Slots[Run] | None = None
        if self._reach is not None and device is not None:
            self._device_slots = device_slots(self._reach, geometry, device)
        elif self._reach is not None:
            self._slots = host_slots(self._reach, geometry)
        self._held_pieces = held_pieces
        self._idle = IdleLinks(self._clock)
        self._lock = threading.Lock()
        self._active: set[Inbound] = set()
        self._closed = False
        self._board.watch(self._idle_rooms)
        self._pulse = Pulse("pdctl-fetch-pulse", self.check)
        self._pulse.start()
        self._services = Services(
            connect=self._connect,
            post=self._pulse.post,
            count=self._count,
            finished=self._finished,
            digest=identity.digest,
            clock=self._clock,
            pulls=self._pulls,
        )

    def start(self) -> None:
        """It dials: nothing is to be begun."""

    def fetch(
        self,
        leg: Leg,
        token_ids: Sequence[int] | Tokens,
        sink: PageSink,
        on_settled: Callable[[Inbound], None] | None = None,
    ) -> Inbound:
        """Starts one handoff; `sink` learns the rest. Never blocks on the network.

        Args:
            on_settled: called at the very end, on any thread; it must not block.

        Raises:
            HandoffExpired: the leg's time is not a positive number of seconds.
            HandoffCancelled: the receiver is closed.
            HandoffError: the tokens are none, or not unsigned 32-bit integers.
        """
        tokens = Tokens.of(token_ids)
        inbound = Inbound(leg, tokens.sha256, tokens.count, sink, self._services)
        inbound.on_settled = on_settled
        with self._lock:
            if self._closed:
                raise HandoffCancelled("the receiver is closed")
            self._active.add(inbound)
        self._board.add(peer=leg.prefill, handoffs_active=1)
        inbound.start()
        self._pulse.wake()
        return inbound

    def close(self) -> None:
        """Ends every handoff as cancelled, every connection and thread; bounded."""
        with self._lock:
            self._closed = True
            active = list(self._active)
        for inbound in active:
            inbound.cancel()
        until = time.monotonic() + CLOSE_S
        for inbound in active:
            inbound.join(max(0.0, until - time.monotonic()))
        self._idle.close()
        self._pulse.stop(CLOSE_S)
        self._close_reach()

    def check(self) -> bool:
        """One beat: deadlines, life, idle connections. True while anything is under way."""
        now = self._clock()
        with self._lock:
            active = list(self._active)
        for inbound in active:
            inbound.check(now)
        self._idle.expire(now)
        for slots in (self._slots, self._device_slots):
            if slots is not None:
                slots.look_again()
        return bool(active)

    def _idle_rooms(self) -> dict[int, float]:
        now = self._clock()
        with self._lock:
            active = list(self._active)
        return {inbound.room: inbound.deadline.idle_s(now) for inbound in active}

    def _connect(self, inbound: Inbound, fresh: bool) -> Link:
        address = parse_address(inbound.leg.sender)
        link = None if fresh else self._idle.take(address)
        if link is not None:
            link.reused = True
            self._hand_over(inbound, link)
            return link
        patience_s = max(0.001, min(DIAL_S, inbound.remaining_s))
        try:
            connection = self._transport.dial(address, patience_s)
        except PeerLost as error:
            said = f"{inbound.leg.prefill}: {error.message}"
            raise PeerLost(said, hint=error.hint) from error
        link = Link(connection, self._geometry, self._clock, self._memory, self._held_pieces)
        self._hand_over(inbound, link)
        card = answer(link, self._identity.key)
        self._board.met(inbound.leg.prefill, link.round_trip_s)
        if self._reach is not None and self._reads(inbound.leg.prefill):
            link.card = self._met(self._reach, inbound.leg.prefill, address, card)
        return link

    def _met(self, reach: Reach, prefill: str, address: tuple[str, int], card: bytes) -> bytes:
        if not card:
            raise HandoffError(
                f"{prefill} has no {reach.name}: its memory can't be read",
                hint="both ends of a pair must be started from the same topology",
            )
        reach.meet(address, card)
        return card

    def _pulls(self, link: Link, reading: Reading) -> HostPulls | DevicePulls | None:
        """Called on the thread that is to read."""
        if self._reach is None or not link.card:
            return None
        if self._device_slots is not None:
            return DevicePulls(self._reach, self._device_slots, link, reading.place_from)
        if self._slots is None:
            return None
        return HostPulls(
            self._reach,
            self._slots,
            link,
            lambda header, piece: reading.place(link, header, link.kept(piece)),
        )

    def _hand_over(self, inbound: Inbound, link: Link) -> None:
        try:
            inbound.use(link)
        except BaseException:
            link.connection.unblock()
            link.connection.close()
            raise

    def _count(self, inbound: Inbound) -> None:
        leg, error, want = inbound.leg, inbound.error, inbound.want
        imported = reused = 0
        if error is None and want is not None:
            imported = want.tokens - want.held_tokens
            reused = want.held_tokens // self._geometry.page_tokens
        self._count_end(
            leg.room,
            leg.prefill,
            error,
            handoffs_active=-1,
            host_bytes=0 if inbound.on_device else inbound.received_bytes,
            gpu_bytes=inbound.received_bytes if inbound.on_device else 0,
            imported_tokens=imported,
            reused_pages=reused,
        )

    def _finished(self, inbound: Inbound, link: Link | None) -> None:
        with self._lock:
            self._active.discard(inbound)
        if link is not None:
            self._idle.put(parse_address(inbound.leg.sender), link)
