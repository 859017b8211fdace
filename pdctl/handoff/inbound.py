"""One handoff on the receiver: a thread that reads, and the engine's sink."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np

from pdctl.errors import (
    HandoffCancelled,
    HandoffError,
    HandoffExpired,
    PeerLost,
    ProtocolViolation,
    TokensDiffer,
    handoff_error,
)
from pdctl.handoff import wire
from pdctl.handoff.assembly import Assembly
from pdctl.handoff.identity import Leg
from pdctl.handoff.lease import DEAD_S, Deadline, Verdict, judge
from pdctl.handoff.link import Link
from pdctl.handoff.page import PATTERN
from pdctl.handoff.pulse import guarded
from pdctl.handoff.sink import PageSink, Want
from pdctl.handoff.state import RECEIVER_FINAL, Event, Receiving, receiving

log = logging.getLogger("pdctl.handoff")

Result = TypeVar("Result")


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """What the receiver does for each of its handoffs."""

    connect: Callable[[Inbound], Link]
    """A proved connection to the leg's sender, new or reused; it has been given to `use`."""
    post: Callable[[Callable[[], None]], None]
    count: Callable[[Inbound], None]
    """Counts the end; before anybody is told."""
    finished: Callable[[Inbound, Link | None], None]
    """Takes the connection back, or None where it can't be reused."""
    digest: str
    clock: Callable[[], float]


class Inbound:
    """Thread-safe. Ends exactly once, by the sink's `commit` or its `abort`."""

    def __init__(
        self, leg: Leg, token_sha256: bytes, tokens: int, sink: PageSink, services: Services
    ) -> None:
        self.leg = leg
        self.room = leg.room
        self.error: HandoffError | None = None
        """Why it failed; set before `settled`."""
        self.settled = threading.Event()
        """Set after commit or abort has returned and the counters tell it."""
        self.want: Want | None = None
        self.received_bytes = 0
        self._token_sha256 = token_sha256
        self._tokens = tokens
        self._sink = sink
        self._services = services
        self._deadline = Deadline(leg.timeout_s, services.clock())
        self._sender_tokens = 0
        self._lock = threading.Lock()
        self._machine = receiving()
        self._link: Link | None = None
        self._over = False
        self._assembly: Assembly | None = None
        name = f"pdctl-fetch-{leg.room:x}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._allocating: threading.Thread | None = None

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def cancel(self) -> None:
        """Ends the handoff unless it is being committed already; never blocks.

        The sink's present call returns before its `abort` is called (R10).
        """
        self._services.post(
            lambda: self._give_up(
                HandoffCancelled(f"room {self.room} was cancelled on the receiver")
            )
        )

    @property
    def remaining_s(self) -> float:
        return self._deadline.at - self._services.clock()

    def use(self, link: Link) -> None:
        """The connection that `connect` is about to prove or to hand over.

        Raises:
            HandoffError: the handoff is over already.
        """
        with self._lock:
            if self.error is not None:
                raise self.error
            self._link = link
            link.life.start(link.clock())

    def check(self, now: float) -> None:
        """One beat of the pulse. Never blocks."""
        link = self._link
        if link is not None:
            self._deadline.progressed(link.payload_at)
        life = None if link is None else link.life
        verdict = judge(life, self._deadline, now)
        if verdict is Verdict.EXPIRED:
            self._give_up(
                HandoffExpired(
                    f"room {self.room} made no progress for {self._deadline.timeout_s:g} s "
                    f"while {self._machine.state.value}",
                    hint="raise handoff.timeout_s if prompts take longer than that",
                )
            )
        elif verdict is Verdict.DEAD:
            self._give_up(
                PeerLost(f"{self.leg.prefill} at {self.leg.sender} was silent for {DEAD_S:g} s")
            )
        elif verdict is Verdict.RENEW and link is not None:
            with self._lock:
                if self._machine.state not in (Receiving.NEW, *RECEIVER_FINAL):
                    link.send_now(wire.Renew(tokens=0), self.room)

    # -- the end -------------------------------------------------------------------------

    def _give_up(self, error: HandoffError) -> None:
        """Ends the handoff from any thread: tells the sender and wakes the reading thread,
        which finishes. While it dials there is nothing to drain: then this finishes."""
        with self._lock:
            past = (*RECEIVER_FINAL, Receiving.COMMITTING)
            if self.error is not None or self._machine.state in past:
                return
            greeted = self._machine.state is not Receiving.NEW
            self._fail(error)
            link = self._link
            if greeted and link is not None:
                # under the lock: the reading thread closes the connection only after this
                self._tell(link, error)
        if link is None:
            self._finish(None)
        else:
            link.connection.unblock()

    def _fail(self, error: HandoffError) -> None:
        self.error = error
        self._machine.on(Event.FAIL)

    def _tell(self, link: Link, error: HandoffError) -> None:
        detail = error.message[: wire.MAX_DETAIL_CHARS]
        abort = wire.Abort(cause=error.cause, detail=detail)
        # frames of this end are tiny: the other thread's is gone in no time
        link.send_now(abort, self.room, patience_s=0.2)

    def _finish(self, link: Link | None) -> None:
        """Counts, then tells the sender or the engine; `link` can be used again."""
        with self._lock:
            if self._over:
                return
            self._over = True
        error = self.error
        guarded(lambda: self._services.count(self))
        if error is not None:
            guarded(lambda: self._sink.abort(error))
        elif link is not None:
            link = self._say_done(link)
        self._services.finished(self, link)
        self.settled.set()

    def _say_done(self, link: Link) -> Link | None:
        try:
            link.send(wire.Done(), self.room)
        except PeerLost as error:
            # committed here all the same; the sender fails its leg by itself
            log.warning("room=%s committed, but the sender was not told: %s", self.room, error)
            link.connection.unblock()
            link.connection.close()
            return None
        return link

    # -- the reading thread --------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._exchange()
        except HandoffError as error:
            self._give_up(error)
        # this thread's boundary: a bug here must still free the engine's memory
        except Exception as error:
            log.exception("room=%s the receiver's session failed", self.room)
            self._give_up(HandoffError(f"the receiver failed: {error!r}"))
        if self._allocating is not None:
            self._allocating.join()
        with self._lock:
            link = self._link
        if self.error is not None and link is not None:
            link.connection.unblock()
            link.connection.close()
            link = None
        self._finish(link)

    def _exchange(self) -> None:
        link = self._services.connect(self)
        self._on(Event.HELLO)
        hello = wire.Hello(decode=self.leg.decode, ticket=self.leg.ticket)
        link.send(hello, self.room, fingerprint=self._services.digest)
        while True:
            header = link.read_header()
            if header.room != self.room and header.kind is not wire.Kind.RENEW:
                raise ProtocolViolation(f"the sender sent {header.kind.name} of room {header.room}")
            if header.kind is wire.Kind.PAGES:
                self._piece(link, header)
                continue
            message = link.read_message(header)
            if isinstance(message, wire.Renew):
                self._renewed(message)
            elif isinstance(message, wire.Abort):
                self._aborted(message)
            elif isinstance(message, wire.Offer):
                self._offered(link, message)
            elif isinstance(message, wire.End):
                self._landed(link, message)
                return
            else:
                raise ProtocolViolation(f"the sender sent {header.kind.name} out of order")

    def _on(self, event: Event) -> None:
        with self._lock:
            if self.error is not None:
                raise self.error
            self._machine.on(event)

    def _renewed(self, message: wire.Renew) -> None:
        """Progress of the sender's computing, where there is any, renews the deadline."""
        self._on(Event.RENEW)
        if message.tokens > self._sender_tokens:
            self._sender_tokens = message.tokens
            self._deadline.progressed(self._services.clock())

    def _aborted(self, message: wire.Abort) -> None:
        error = handoff_error(message.cause, f"{self.leg.prefill}: {message.detail}")
        with self._lock:
            if self.error is None:
                self._machine.on(Event.ABORT)
                self.error = error
        raise error

    def _offered(self, link: Link, offer: wire.Offer) -> None:
        self._on(Event.OFFER)
        same = offer.tokens == self._tokens and offer.token_sha256 == self._token_sha256
        if not same:
            raise TokensDiffer(
                f"{self.leg.prefill} made {offer.tokens} tokens of the prompt, "
                f"{self.leg.decode} {self._tokens}",
                hint="compare tokenizer and chat template of the two replicas",
            )
        self._deadline.progressed(self._services.clock())
        self._allocating = threading.Thread(
            target=self._allocate, args=(link,), name=self._thread.name + "-offer", daemon=True
        )
        self._allocating.start()

    def _allocate(self, link: Link) -> None:
        """Its own thread: the reading one must notice when the sender goes meanwhile."""
        try:
            want = self._engine(lambda: self._sink.offered(self._tokens, self._deadline.at))
            assembly = Assembly(link.geometry, want, self._tokens)
            with self._lock:
                if self.error is not None:
                    return
                self.want, self._assembly = want, assembly
                self._machine.on(Event.GRANT)
            self._deadline.progressed(self._services.clock())
            self._send_grant(link, want)
        except HandoffError as error:
            self._give_up(error)
        # this thread's boundary
        except Exception as error:
            log.exception("room=%s the receiver's session failed", self.room)
            self._give_up(HandoffError(f"the receiver failed: {error!r}"))

    def _send_grant(self, link: Link, want: Want) -> None:
        grant = wire.Grant(
            tokens=want.tokens, held_tokens=want.held_tokens, first_token=want.first_token
        )
        try:
            link.send(grant, self.room)
        except PeerLost:
            # the reading thread learns why: an Abort may have come before the connection broke
            log.debug("room=%s the connection broke before the grant", self.room)

    def _piece(self, link: Link, header: wire.Header) -> None:
        self._on(Event.PAGES)
        assert self._assembly is not None
        self._assembly.take(header)
        raw = link.read_piece(header)
        self.received_bytes += raw.nbytes
        shape = (header.layers, *link.geometry.shape[1:])
        piece = np.frombuffer(raw, dtype=PATTERN).reshape(shape)
        self._engine(lambda: self._sink.write(header.page, header.first_layer, piece))

    def _landed(self, link: Link, end: wire.End) -> None:
        self._on(Event.END)
        assert self._assembly is not None
        first_token = self._assembly.complete(end)
        # from here on a cancel comes too late
        self._on(Event.COMMIT)
        try:
            self._engine(lambda: self._sink.commit(first_token))
        except HandoffError as error:
            with self._lock:
                self._fail(error)
            self._tell(link, error)
            raise
        self._on(Event.DONE)

    def _engine(self, call: Callable[[], Result]) -> Result:
        """One call of the sink; not made once the handoff is over."""
        if self.error is not None:
            raise self.error
        try:
            return call()
        except HandoffError:
            raise
        # the engine may raise anything: this handoff fails, others go on (R34)
        except Exception as error:
            log.exception("room=%s the decode engine failed", self.room)
            raise HandoffError(f"the decode engine {self.leg.decode} failed: {error!r}") from error
