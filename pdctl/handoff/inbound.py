"""One handoff on the receiver: its state, its deadline and its one end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec

from pdctl.errors import (
    HandoffCancelled,
    HandoffError,
    HandoffExpired,
    PeerLost,
)
from pdctl.handoff import wire
from pdctl.handoff.identity import Leg
from pdctl.handoff.lease import DEAD_S, Deadline, Verdict, judge
from pdctl.handoff.link import Link
from pdctl.handoff.pulls import DevicePulls, HostPulls
from pdctl.handoff.pulse import guarded
from pdctl.handoff.reading import Reading, Stale
from pdctl.handoff.sink import PageSink, Want
from pdctl.handoff.state import RECEIVER_FINAL, Event, Receiving, receiving

log = logging.getLogger("pdctl.handoff")


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """What the receiver does for each of its handoffs."""

    connect: Callable[[Inbound, bool], Link]
    """A proved connection to the leg's sender, new (where that is asked for) or reused; it has
    been given to `use`."""
    post: Callable[[Callable[[], None]], None]
    count: Callable[[Inbound], None]
    """Counts the end; before anybody is told."""
    finished: Callable[[Inbound, Link | None], None]
    """Takes the connection back, or None where it can't be reused."""
    digest: str
    clock: Callable[[], float]
    pulls: Callable[[Link, Reading], HostPulls | DevicePulls | None]
    """The reads of one handoff, where its pieces are read out of the sender's memory."""


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
        self.on_settled: Callable[[Inbound], None] | None = None
        self.want: Want | None = None
        self.received_bytes = 0
        self.on_device = False
        """They were read into a device's memory."""
        self.token_sha256 = token_sha256
        self.tokens = tokens
        self.pulls = services.pulls
        self._sink = sink
        self._services = services
        self.deadline = Deadline(leg.timeout_s, services.clock())
        self._lock = threading.Lock()
        self._machine = receiving()
        self._link: Link | None = None
        self._received_before = 0
        self._over = False
        name = f"pdctl-fetch-{leg.room:x}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def cancel(self) -> None:
        """Ends the handoff unless it is being committed already; never blocks.

        The sink's present call returns before its `abort` is called (R10).
        """
        self._services.post(
            lambda: self.give_up(
                HandoffCancelled(f"room {self.room} was cancelled on the receiver")
            )
        )

    @property
    def remaining_s(self) -> float:
        return self.deadline.at - self._services.clock()

    def use(self, link: Link) -> None:
        """The connection that `connect` is about to prove or to hand over.

        Raises:
            HandoffError: the handoff is over already.
        """
        with self._lock:
            if self.error is not None:
                raise self.error
            self._link = link
            self._received_before = link.payload_bytes
            link.life.start(link.clock())

    def check(self, now: float) -> None:
        """One beat of the pulse. Never blocks."""
        link = self._link
        if link is not None:
            self.deadline.progressed(link.payload_at)
        life = None if link is None else link.life
        verdict = judge(life, self.deadline, now)
        if verdict is Verdict.EXPIRED:
            self.give_up(self._expired())
        elif verdict is Verdict.DEAD:
            self.give_up(
                PeerLost(f"{self.leg.prefill} at {self.leg.sender} was silent for {DEAD_S:g} s")
            )
        elif verdict is Verdict.RENEW and link is not None:
            with self._lock:
                if self._machine.state not in (Receiving.NEW, *RECEIVER_FINAL):
                    link.send_now(wire.Renew(tokens=self._received_tokens(link)), self.room)

    def _expired(self) -> HandoffExpired:
        state, waited = self._machine.state, f"for {self.deadline.timeout_s:g} s"
        if state is Receiving.GREETED:
            return HandoffExpired(
                f"room {self.room}: {self.leg.prefill} offered no pages {waited}: its "
                "buffer is full, or it is busy",
                hint="raise handoff.timeout_s, or handoff.buffer_bytes",
            )
        return HandoffExpired(
            f"room {self.room} made no progress {waited} while {state.value}",
            hint="raise handoff.timeout_s if prompts take longer than that",
        )

    def _received_tokens(self, link: Link) -> int:
        received = link.payload_bytes - self._received_before
        return received * link.geometry.page_tokens // link.geometry.page_bytes

    # -- the end -------------------------------------------------------------------------

    def give_up(self, error: HandoffError) -> None:
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
        if (told := self.on_settled) is not None:
            guarded(lambda: told(self))

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

    # -- the reading thread's side (`reading.py`) ----------------------------------------

    def _run(self) -> None:
        reading = Reading(self, self._sink, self._services.clock)
        try:
            link = self._services.connect(self, False)
            self.on(Event.HELLO)
            try:
                first = reading.greet(link, self._services.digest)
            except Stale:
                link = self._connect_anew(link)
                first = reading.greet(link, self._services.digest)
            reading.exchange(link, first)
        except HandoffError as error:
            self.give_up(error)
        # this thread's boundary: a bug here must still free the engine's memory
        except Exception as error:
            log.exception("room=%s the receiver's session failed", self.room)
            self.give_up(HandoffError(f"the receiver failed: {error!r}"))
        reading.join()
        with self._lock:
            kept = self._link
        if self.error is not None and kept is not None:
            kept.connection.unblock()
            kept.connection.close()
            kept = None
        self._finish(kept)

    def _connect_anew(self, stale: Link) -> Link:
        with self._lock:
            if self.error is not None:
                raise self.error
            self._link = None
        stale.connection.unblock()
        stale.connection.close()
        return self._services.connect(self, True)

    def on(self, event: Event) -> None:
        """Moves on; raises the handoff's error where it is over."""
        with self._lock:
            if self.error is not None:
                raise self.error
            self._machine.on(event)

    def aborted(self, error: HandoffError) -> None:
        """The sender's Abort; raises what ended the handoff."""
        with self._lock:
            if self.error is None:
                self._machine.on(Event.ABORT)
                self.error = error
        raise self.error

    def commit_failed(self, error: HandoffError) -> None:
        """The engine could not commit: the one failure that may come so late."""
        with self._lock:
            self._fail(error)
            if self._link is not None:
                self._tell(self._link, error)
