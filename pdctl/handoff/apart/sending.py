"""A `Sender` in the data plane's process, for the engine: the same interface."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Unpack

from pdctl.errors import HandoffCancelled, HandoffError
from pdctl.handoff.apart.calls import (
    Admit,
    Call,
    Dropped,
    Fail,
    Finish,
    Granted,
    Release,
    Reserved,
    SentLeg,
    Settled,
    SkipLast,
    Trouble,
    Written,
)
from pdctl.handoff.apart.plane import ApartCommon, Plane
from pdctl.handoff.apart.shared import SharedMemory
from pdctl.handoff.identity import Leg, Tokens
from pdctl.handoff.lease import checked_timeout
from pdctl.handoff.opening import Opening
from pdctl.handoff.page import PATTERN, Patterns
from pdctl.handoff.pulse import guarded
from pdctl.handoff.seam import Outgoing
from pdctl.trace import monotonic_s

Told = Callable[[Outgoing], None]


class ApartSender:
    """As `sender.Sender`, but for what only the data plane can know: a ticket that was used, a
    buffer that is too small. `admit` does not raise it: the handoff fails.

    """

    def __init__(self, opening: Opening, **common: Unpack[ApartCommon]) -> None:
        memory = SharedMemory.make(opening.buffer_bytes)
        lock = common["lock"]
        if lock is not None:
            lock(memory.bytes)
        self._geometry = opening.geometry
        self._on_failed = common["on_failed"]
        self._guard = threading.Lock()
        self._open: dict[int, ApartOutbound] = {}
        self._number = 0
        self._dropped: deque[int] = deque()
        """Appended to by finalizers, which run anywhere: so without a lock."""
        self._plane = Plane(
            opening,
            memory,
            heard=self._heard,
            lost=self._lost,
            **common,
        )

    @property
    def pid(self) -> int:
        """Of the data plane's process."""
        return self._plane.pid

    def start(self) -> int:
        """The port that listens. Raises PeerLost where it can't listen there."""
        port = self._plane.wait_open()
        assert port is not None
        return port

    def admit(
        self, leg: Leg, token_ids: Sequence[int], *, on_reserved: Told, on_settled: Told
    ) -> ApartOutbound:
        """Raises HandoffExpired for the leg's time, HandoffError for the tokens, or where the
        data plane is gone."""
        checked_timeout(leg.timeout_s)
        tokens = Tokens.of(token_ids)
        with self._guard:
            self._number += 1
            outbound = ApartOutbound(self, self._number, leg, tokens.count, on_reserved, on_settled)
            if self._plane.error is not None:
                raise self._plane.error
            self._open[outbound.number] = outbound
        self.say(Admit(outbound.number, SentLeg.of(leg), tokens))
        return outbound

    def release(self, room: int) -> None:
        self.say(Release(room))

    def close(self) -> None:
        self._plane.close()

    def say(self, call: Call) -> None:
        self._plane.say(call)
        self._say_dropped()

    def pages_at(self, outbound: ApartOutbound, offset: int) -> Patterns:
        """The data plane keeps them until no array over them is left here."""
        geometry = self._geometry
        pages = geometry.pages_for(outbound.tokens)
        run = self._plane.memory.run(offset, pages * geometry.page_bytes)
        weakref.finalize(run, self._drop, outbound.number).atexit = False
        return run.view(PATTERN).reshape(pages, *geometry.shape)

    @property
    def layers(self) -> int:
        return self._geometry.layers

    # -- the hearing thread

    def _heard(self, call: Call) -> None:
        if isinstance(call, Granted | Reserved | Settled):
            with self._guard:
                outbound = self._open.get(call.number)
                if isinstance(call, Settled):
                    self._open.pop(call.number, None)
            if outbound is not None:
                self._tell(outbound, call)
            elif isinstance(call, Reserved):
                self._dropped.append(call.number)
        self._say_dropped()

    def _drop(self, number: int) -> None:
        """A finalizer."""
        self._dropped.append(number)
        self._say_dropped()

    def _say_dropped(self) -> None:
        """All of them, or none while somebody else says something, who comes here afterwards."""
        # another thread may be at it
        with contextlib.suppress(IndexError):
            while True:
                number = self._dropped.popleft()
                if not self._plane.say_unless_busy(Dropped(number)):
                    self._dropped.appendleft(number)
                    return

    def _tell(self, outbound: ApartOutbound, call: Granted | Reserved | Settled) -> None:
        if isinstance(call, Granted):
            outbound.granted(call.tokens)
        elif isinstance(call, Reserved):
            outbound.reserved(call.offset)
        else:
            error = None if call.trouble is None else call.trouble.error()
            if call.refused and error is not None:
                self._on_failed(outbound.room, error.cause, error.message)
            outbound.settle(error, done=call.done)

    def _lost(self, error: HandoffError) -> int:
        with self._guard:
            left = list(self._open.values())
            self._open.clear()
        for outbound in left:
            guarded(partial(self._on_failed, outbound.room, error.cause, error.message))
            outbound.settle(error, done=False)
        return len(left)


class ApartOutbound:
    """As `outbound.Outbound` for the engine."""

    def __init__(
        self,
        sender: ApartSender,
        number: int,
        leg: Leg,
        tokens: int,
        on_reserved: Told,
        on_settled: Told,
    ) -> None:
        self.number = number
        self.room = leg.room
        self.tokens = tokens
        self.decode = leg.decode
        self.error: HandoffError | None = None
        self.done = False
        self.settled = threading.Event()
        self._sender = sender
        self._on_reserved = on_reserved
        self._on_settled = on_settled
        self._lock = threading.Lock()
        self._pages: Patterns | None = None
        self._granted: int | None = None
        self._ending = self._begun = False

    # -- the engine

    def pages(self) -> Patterns:
        with self._lock:
            if self._pages is None:
                raise self.error or HandoffCancelled(f"room {self.room} holds no pages")
            return self._pages

    def written(
        self, tokens: int, computed_at: float | None = None, *, layers: int | None = None
    ) -> None:
        if tokens > self.tokens:
            raise ValueError(f"{tokens} positions written, the prompt has {self.tokens}")
        if layers is not None and layers > self._sender.layers:
            raise ValueError(f"{layers} layers written, a page has {self._sender.layers}")
        at = monotonic_s() if computed_at is None else computed_at
        self._say(Written(self.number, tokens, at, layers))

    def begin_last(self) -> bool:
        with self._lock:
            unwanted = self._granted is not None and self._granted < self.tokens
            if self._ending or not unwanted:
                return not self._ending
        self._say(SkipLast(self.number))
        return False

    def finish(self, first_token: int) -> None:
        self._say(Finish(self.number, first_token))

    def cancel(self) -> None:
        self._end(None)

    def fail(self, error: HandoffError) -> None:
        self._end(Trouble.of(error))

    def _end(self, trouble: Trouble | None) -> None:
        self._say(Fail(self.number, trouble))
        with self._lock:
            self._ending = True
            self._pages = None

    def _say(self, call: Call) -> None:
        if not self._ending:
            self._sender.say(call)

    # -- the hearing thread

    def granted(self, tokens: int) -> None:
        with self._lock:
            self._granted = tokens

    def reserved(self, offset: int) -> None:
        pages = self._sender.pages_at(self, offset)
        with self._lock:
            if self._ending:
                return
            self._pages, self._begun = pages, True
        guarded(lambda: self._on_reserved(self))

    def settle(self, error: HandoffError | None, *, done: bool) -> None:
        with self._lock:
            # a receiver that lacks nothing may be done before this process hears of pages
            unheard = done and not (self._ending or self._begun)
            self._ending = True
            self._pages = None
            self.error, self.done = error, done
        self.settled.set()
        if unheard:
            guarded(lambda: self._on_reserved(self))
        guarded(lambda: self._on_settled(self))
