"""The sender's end of one connection: a thread that reads and a thread that writes."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import msgspec

from pdctl.errors import (
    ContractRejected,
    HandoffError,
    HandoffExpired,
    PeerLost,
    ProtocolViolation,
    handoff_error,
)
from pdctl.handoff import wire
from pdctl.handoff.handshake import challenge
from pdctl.handoff.identity import Identity
from pdctl.handoff.lease import DEAD_S, Verdict
from pdctl.handoff.leaving import send_part
from pdctl.handoff.link import Link
from pdctl.handoff.outbound import Outbound
from pdctl.handoff.prompt import Over
from pdctl.handoff.rooms import Rooms
from pdctl.handoff.schedule import PagePart
from pdctl.handoff.ticket import verify

log = logging.getLogger("pdctl.handoff")

IDLE_S = 60.0
"""A connection without a handoff is closed after that; receivers close theirs sooner."""
HANDSHAKE_S = 5.0
GRACE_S = 1.0
"""What an ended handoff's last piece and Abort may take before the connection is cut."""


class Terms(msgspec.Struct, frozen=True):
    """What every connection of one sender shares."""

    identity: Identity
    rooms: Rooms
    awaited_s: float
    """How long a Hello waits for its prompt."""
    closed: Callable[[Serving], None]
    card: bytes = b""
    """How the pages are read; empty where they are sent."""


class Serving:
    """One receiver's connection; handoffs follow each other on it (R38)."""

    def __init__(self, link: Link, terms: Terms) -> None:
        self._link = link
        self._terms = terms
        self._identity = terms.identity
        self.decode = ""
        self.proved = False
        self._since = link.clock()
        """When the present phase (handshake, idle, waiting for the prompt) began."""
        self._room: int | None = None
        self._addressed = 0
        """The room of the last Hello, refused or not."""
        self._expires_at_s = 0.0
        self._outbound: Outbound | None = None
        self._verdict: HandoffError | None = None
        self.reads = False
        """The receiver reads pieces itself."""
        self._given_up = False
        self._ending_at: float | None = None
        self._work: queue.SimpleQueue[Outbound | None] = queue.SimpleQueue()
        name = f"pdctl-send-{link.connection.peer}"
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._writer = threading.Thread(target=self._write, name=name + "-pages", daemon=True)

    def start(self) -> None:
        self._reader.start()

    def join(self, timeout_s: float) -> None:
        self._reader.join(timeout_s)

    @property
    def busy(self) -> bool:
        return self._room is not None or not self.proved

    def engage(self, outbound: Outbound) -> None:
        """The room's prompt is here; called with the room's lock held."""
        self._outbound = outbound
        self._work.put(outbound)

    def unblock(self) -> None:
        self._given_up = True
        self._link.connection.unblock()

    # -- pulse ---------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Ends what has lasted too long, and renews. Never blocks."""
        room, outbound = self._room, self._outbound
        if not self.proved:
            if now - self._since >= HANDSHAKE_S:
                self.unblock()
        elif room is None:
            if now - self._since >= IDLE_S:
                self.unblock()
        elif outbound is not None and outbound.over:
            self._check_ending(now)
        elif outbound is None and now - self._since >= self._terms.awaited_s:
            waited = f"room {room}: no prompt came within {self._terms.awaited_s:g} s"
            self._lose(HandoffExpired(waited), tell=True)
        else:
            self._check_life(now, room, outbound)

    def _check_ending(self, now: float) -> None:
        if self._ending_at is None:
            self._ending_at = now
        elif now - self._ending_at >= GRACE_S:
            self.unblock()

    def _check_life(self, now: float, room: int, outbound: Outbound | None) -> None:
        if outbound is not None:
            outbound.moved(self._link.payload_at)
        verdict = self._link.life.verdict(now)
        if verdict is Verdict.DEAD:
            peer = self._link.connection.peer
            self._lose(PeerLost(f"{self.decode} at {peer} was silent for {DEAD_S:g} s"))
        elif verdict is Verdict.RENEW:
            positions = 0 if outbound is None else outbound.positions
            self._link.send_now(wire.Renew(tokens=positions), room)

    def _lose(self, error: HandoffError, *, tell: bool = False) -> None:
        if self._verdict is None:
            self._verdict = error
            if tell:
                self._tell(error)
            self.unblock()

    def _tell(self, error: HandoffError) -> None:
        self._link.send_now(_abort(error), self._addressed, patience_s=0.2)

    # -- reader --------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            challenge(self._link, self._identity.key, self._terms.card)
            self._writer.start()
            self._since = self._link.clock()
            self.proved = True
            while True:
                self._handle(self._link.read_header())
        except HandoffError as error:
            self._end(self._verdict or error)
        # this thread's boundary: a bug here must free the room and the connection
        except Exception as error:
            log.exception("room=%s the sender's session failed", self._room)
            self._end(HandoffError(f"the sender failed: {error!r}"))

    def _handle(self, header: wire.Header) -> None:
        if header.kind is wire.Kind.HELLO:
            self._hello(header)
            return
        if header.kind is wire.Kind.PAGES:
            raise ProtocolViolation("the receiver sent pages")
        message = self._link.read_message(header)
        outbound = self._outbound
        if isinstance(message, wire.Renew):
            if outbound is not None and header.room == self._room:
                outbound.renewed(message.tokens)
            return
        if header.room != self._room:
            raise ProtocolViolation(f"the peer sent {header.kind.name} of room {header.room}")
        if isinstance(message, wire.Abort):
            self._aborted(handoff_error(message.cause, f"{self.decode}: {message.detail}"))
        if isinstance(message, wire.Grant) and outbound is not None:
            outbound.granted(message)
        elif isinstance(message, wire.Taken) and outbound is not None:
            outbound.taken(message.pieces)
        elif isinstance(message, wire.Done) and outbound is not None:
            self._done(outbound)
        else:
            raise ProtocolViolation(f"the peer sent {header.kind.name} out of order")

    def _hello(self, header: wire.Header) -> None:
        body = self._link.read_body(header)
        if self._room is not None:
            raise ProtocolViolation(f"a Hello while room {self._room} is open")
        if self._given_up:
            raise PeerLost("a Hello came after the connection was given up")
        self._addressed = header.room
        fingerprint, rest = wire.read_hello(header, body)
        if fingerprint != self._identity.digest:
            raise ContractRejected(
                f"the receiver's contract is {fingerprint[:12]}, "
                f"that of {self._identity.replica} {self._identity.digest[:12]}"
            )
        hello = wire.hello_rest(rest)
        if hello.reads and not self._terms.card:
            raise HandoffError(f"the pages of {self._identity.replica} can't be read, only sent")
        self._expires_at_s = verify(
            self._identity.key,
            hello.ticket,
            room=header.room,
            prefill=self._identity.replica,
            decode=hello.decode,
            digest=self._identity.digest,
            now_s=time.time(),
        )
        now = self._link.clock()
        self.decode, self.reads, self._since = hello.decode, hello.reads, now
        self._link.life.start(now)
        self._ending_at = None
        self._room = header.room
        try:
            self._terms.rooms.claim(header.room, self, time.time())
        except HandoffError:
            self._outbound = None
            raise

    def _aborted(self, error: HandoffError) -> None:
        if self._outbound is not None:
            self._outbound.aborted(error)
        self._lose(error)
        raise error

    def _done(self, outbound: Outbound) -> None:
        outbound.committed()
        if outbound.error is not None:
            # this end gave it up first: the connection ends, and no next Hello is heard on it
            self._lose(outbound.error)
            raise outbound.error
        self._since = self._link.clock()
        self._outbound = None
        self._room = None
        outbound.settle()

    def _end(self, error: HandoffError) -> None:
        room = self._room
        if room is not None:
            self._terms.rooms.leave(room, self, error, self._expires_at_s)
        outbound = self._outbound
        if self._verdict is None and not isinstance(error, PeerLost) and self.proved:
            self._tell(error)
        if outbound is not None:
            outbound.lose(error)
        elif room is None and not isinstance(error, PeerLost):
            log.info("a connection from %s was refused: %s", self._link.connection.peer, error)
        self.unblock()
        if self._writer.is_alive():
            self._work.put(None)
            self._writer.join()
        if outbound is not None:
            outbound.settle()
        self._link.connection.close()
        self._terms.closed(self)

    # -- writer --------------------------------------------------------------------------

    def _write(self) -> None:
        while (outbound := self._work.get()) is not None:
            try:
                self._serve(outbound)
            except PeerLost:
                # the reader learns why: an Abort may have come before the connection broke
                log.debug("room=%s the connection broke while sending", outbound.room)
            # this thread's boundary
            except Exception as error:
                log.exception("room=%s the sender's writer failed", outbound.room)
                outbound.fail(HandoffError(f"the sender failed: {error!r}"))
                self.unblock()
            if outbound.error is not None:
                outbound.settle()

    def _serve(self, outbound: Outbound) -> None:
        while True:
            step = outbound.step()
            if isinstance(step, Over):
                self._finish(outbound, step)
                return
            if isinstance(step, PagePart):
                send_part(self._link, outbound, step, reads=self.reads)
            else:
                self._link.send(step, outbound.room)

    def _finish(self, outbound: Outbound, step: Over) -> None:
        if step.tell is not None:
            outbound.settle()
            self._link.send(_abort(step.tell), outbound.room)
            self.unblock()


def _abort(error: HandoffError) -> wire.Abort:
    return wire.Abort(cause=error.cause, detail=error.message[: wire.MAX_DETAIL_CHARS])
