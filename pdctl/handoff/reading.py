"""What a receiver does with each message: the thread that reads one handoff's connection."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from pdctl.errors import (
    HandoffError,
    PeerLost,
    ProtocolViolation,
    TokensDiffer,
    handoff_error,
)
from pdctl.handoff import wire
from pdctl.handoff.assembly import Assembly
from pdctl.handoff.link import Link
from pdctl.handoff.page import PATTERN
from pdctl.handoff.pulls import Asked, DevicePulls, HostPulls, NotAsPlaced
from pdctl.handoff.sink import DeviceSink, PageSink, Piece, Want
from pdctl.handoff.state import Event

if TYPE_CHECKING:
    from pdctl.handoff.inbound import Inbound

log = logging.getLogger("pdctl.handoff")

Result = TypeVar("Result")

EXPLAINED_S = 1.0
"""How long a sender's Abort may take, of a room whose memory it uses for something else."""


class Stale(Exception):
    """A connection that served a room before, and had an end while it was taken for the next:
    the sender's cancel of that room crossed its Done, or its process ended."""


class Reading:
    """Reads until everything is committed, or raises what ended the handoff."""

    def __init__(self, inbound: Inbound, sink: PageSink, clock: Callable[[], float]) -> None:
        self._inbound = inbound
        self._leg = inbound.leg
        self._room = inbound.room
        self._sink = sink
        self._clock = clock
        self._sender_tokens = 0
        self._assembly: Assembly | None = None
        self._allocating: threading.Thread | None = None
        self._pulls: HostPulls | DevicePulls | None = None
        self._told_taken = 0

    def join(self) -> None:
        """Waits for the engine's allocation and for reads where they are under way (R10)."""
        if self._allocating is not None:
            self._allocating.join()
        if self._pulls is not None:
            self._pulls.drain()

    def greet(self, link: Link, digest: str) -> wire.Header:
        """Says Hello; the first header that comes.

        Raises:
            Stale: the connection had been given up before; this room was not heard of.
        """
        reads = bool(link.card)
        hello = wire.Hello(decode=self._leg.decode, ticket=self._leg.ticket, reads=reads)
        try:
            link.send(hello, self._room, fingerprint=digest)
            header = link.read_header()
        except PeerLost as error:
            if link.reused and self._inbound.error is None:
                raise Stale from error
            raise
        if link.reused and header.kind is wire.Kind.ABORT and header.room != self._room:
            raise Stale
        return header

    def exchange(self, link: Link, header: wire.Header) -> None:
        """All of it, from the first header on."""
        self._pulls = self._inbound.pulls(link, self)
        while not self._took(link, header):
            if self._pulls is not None:
                self._pull(link, self._pulls)
            header = link.read_header()

    def _pull(self, link: Link, pulls: HostPulls | DevicePulls) -> None:
        """Reads pieces until the stream has something to say."""
        try:
            pulls.wait_while(link.connection.quiet)
        except NotAsPlaced:
            self._hear_why(link)
            raise
        new = pulls.taken - self._told_taken
        last = pulls.idle and self._assembly is not None and self._assembly.whole
        if new >= pulls.told_every or (new and last):
            self._told_taken = pulls.taken
            self._inbound.on(Event.TAKEN)
            link.send(wire.Taken(pieces=pulls.taken), self._room)

    def _hear_why(self, link: Link) -> None:
        """Raises what the sender says of the end of this room, where it does in time."""
        until = self._clock() + EXPLAINED_S
        while self._clock() < until:
            if link.connection.quiet():
                time.sleep(1e-3)
                continue
            header = link.read_header()
            if header.kind is wire.Kind.PAGES:
                return
            message = link.read_message(header)
            if isinstance(message, wire.Abort):
                self._aborted(message)

    def _took(self, link: Link, header: wire.Header) -> bool:
        """One message; True after the last one."""
        if header.room != self._room and header.kind is not wire.Kind.RENEW:
            raise ProtocolViolation(f"the sender sent {header.kind.name} of room {header.room}")
        if header.kind is wire.Kind.PAGES:
            self._piece(link, header)
            return False
        message = link.read_message(header)
        if isinstance(message, wire.Renew):
            self._renewed(message)
        elif isinstance(message, wire.Abort):
            self._aborted(message)
        elif isinstance(message, wire.Offer):
            self._offered(link, message)
        elif isinstance(message, wire.Placed) and isinstance(self._pulls, HostPulls):
            self._expect(header)
            size = header.layers * link.geometry.layer_bytes
            at = message.address, message.device
            self._pulls.add(Asked(header, *at, size, message.xxh3))
        elif isinstance(message, wire.Spread) and isinstance(self._pulls, DevicePulls):
            self._spread(link, message, self._pulls)
        elif isinstance(message, wire.End):
            self._landed(message)
            return True
        else:
            raise ProtocolViolation(f"the sender sent {header.kind.name} out of order")
        return False

    def _aborted(self, message: wire.Abort) -> None:
        detail = f"{self._leg.prefill}: {message.detail}"
        self._inbound.aborted(handoff_error(message.cause, detail))

    def _renewed(self, message: wire.Renew) -> None:
        """Progress of the sender's computing, where there is any, renews the deadline."""
        self._inbound.on(Event.RENEW)
        if message.tokens > self._sender_tokens:
            self._sender_tokens = message.tokens
            self._inbound.deadline.progressed(self._clock())

    def _offered(self, link: Link, offer: wire.Offer) -> None:
        inbound = self._inbound
        inbound.on(Event.OFFER)
        if (offer.tokens, offer.token_sha256) != (inbound.tokens, inbound.token_sha256):
            raise TokensDiffer(
                f"{self._leg.prefill} made {offer.tokens} tokens of the prompt, "
                f"{self._leg.decode} {inbound.tokens}",
                hint="compare tokenizer and chat template of the two replicas",
            )
        inbound.deadline.progressed(self._clock())
        name = f"pdctl-fetch-{self._room:x}-offer"
        self._allocating = threading.Thread(
            target=self._allocate, args=(link,), name=name, daemon=True
        )
        self._allocating.start()

    def _allocate(self, link: Link) -> None:
        """Its own thread: the reading one must notice when the sender goes meanwhile."""
        inbound = self._inbound
        try:
            want = self._engine(lambda: self._sink.offered(inbound.tokens, inbound.deadline.at))
            self._assembly = Assembly(link.geometry, want, inbound.tokens)
            inbound.want = want
            inbound.on(Event.GRANT)
            inbound.deadline.progressed(self._clock())
            self._send_grant(link, want)
        except HandoffError as error:
            inbound.give_up(error)
        # this thread's boundary
        except Exception as error:
            log.exception("room=%s the receiver's session failed", self._room)
            inbound.give_up(HandoffError(f"the receiver failed: {error!r}"))

    def _send_grant(self, link: Link, want: Want) -> None:
        grant = wire.Grant(
            tokens=want.tokens, held_tokens=want.held_tokens, first_token=want.first_token
        )
        try:
            link.send(grant, self._room)
        except PeerLost:
            # the reading thread learns why: an Abort may have come before the connection broke
            log.debug("room=%s the connection broke before the grant", self._room)

    def _piece(self, link: Link, header: wire.Header) -> None:
        if self._pulls is not None:
            raise ProtocolViolation("the sender sent pages that were to be read")
        self._expect(header)
        self.place(link, header, link.read_piece(header))

    def _spread(self, link: Link, spread: wire.Spread, pulls: DevicePulls) -> None:
        for spot in spread.spots:
            wire.check_layers(spot.first_layer, spot.layers, link.geometry)
            self._expect(spot, spot.pages)
            size = spot.layers * link.geometry.layer_bytes
            pulls.add(Asked(spot, spot.address, spread.device, size, pages=spot.pages))

    def _expect(self, part: wire.Part, pages: int = 1) -> None:
        self._inbound.on(Event.PAGES)
        assert self._assembly is not None
        self._assembly.take(part, pages)

    def place(self, link: Link, header: wire.Part, raw: memoryview) -> None:
        """Hands a piece to the engine."""
        self._inbound.received_bytes += raw.nbytes
        shape = (header.layers, *link.geometry.shape[1:])
        piece = np.frombuffer(raw, dtype=PATTERN).reshape(shape)
        self._engine(lambda: self._sink.write(header.page, header.first_layer, piece))

    def place_from(self, pieces: Sequence[Piece]) -> Callable[[], bool]:
        """Hands pieces to the engine that lie in a device's memory."""
        self._inbound.received_bytes += sum(piece.at.size for piece in pieces)
        self._inbound.on_device = True
        sink = cast(DeviceSink, self._sink)
        return self._engine(lambda: sink.write_from(pieces))

    def _landed(self, end: wire.End) -> None:
        self._inbound.on(Event.END)
        assert self._assembly is not None
        if self._pulls is not None and not self._pulls.idle:
            raise ProtocolViolation("the sender ended before every piece was read")
        first_token = self._assembly.complete(end)
        # from here on a cancel comes too late
        self._inbound.on(Event.COMMIT)
        try:
            self._engine(lambda: self._sink.commit(first_token))
        except HandoffError as error:
            self._inbound.commit_failed(error)
            raise
        self._inbound.on(Event.DONE)

    def _engine(self, call: Callable[[], Result]) -> Result:
        """One call of the sink; not made once the handoff is over."""
        if self._inbound.error is not None:
            raise self._inbound.error
        try:
            return call()
        except HandoffError:
            raise
        # the engine may raise anything: this handoff fails, others go on (R34)
        except Exception as error:
            log.exception("room=%s the decode engine failed", self._room)
            raise HandoffError(f"the decode engine {self._leg.decode} failed: {error!r}") from error
