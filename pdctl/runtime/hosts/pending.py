"""What is under way on one connection: calls without an answer, and pings. No I/O."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pdctl.errors import HostError
from pdctl.runtime.hosts import wire
from pdctl.runtime.hosts.operations import failed, unpack
from pdctl.trace import monotonic_s

_KEPT_TRIPS = 12


class Call:
    """One request.

    Args:
        kind: type of its answer.
        progress: called with what the far end tells meanwhile, from the connection's thread.
    """

    def __init__(self, kind: Any, progress: Callable[[int, int], None] | None) -> None:
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.kind = kind
        self.progress = progress
        self.heard_s = monotonic_s()

    def finish(self, answer: object, error: BaseException | None) -> None:
        """Nothing where nobody waits any more."""
        if not self.future.set_running_or_notify_cancel():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(answer)


class Calls:
    """Calls by their request's id. Thread-safe."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._calls: dict[int, Call] = {}
        self._ended: HostError | None = None

    def add(self, request: int, call: Call) -> None:
        """Raises HostError when the end has come."""
        with self._lock:
            if self._ended is not None:
                raise again(self._ended)
            self._calls[request] = call

    def forget(self, request: int) -> None:
        with self._lock:
            self._calls.pop(request, None)

    def heard(self, request: int) -> Call | None:
        """A sign of that call: its patience begins anew."""
        with self._lock:
            call = self._calls.get(request)
        if call is not None:
            call.heard_s = monotonic_s()
        return call

    def settle(self, message: wire.Answer | wire.Failure) -> None:
        with self._lock:
            call = self._calls.pop(message.id, None)
        if call is None:
            return
        if isinstance(message, wire.Failure):
            call.finish(None, failed(self._host, message))
            return
        try:
            answer = unpack(message.body, call.kind)
        except ValueError as error:  # msgspec's: the far end is not what it says
            garbled = HostError(f'host "{self._host}": an answer is garbled: {error}')
            call.finish(None, garbled)
        else:
            call.finish(answer, None)

    def end(self, cause: HostError) -> None:
        """Fails every call there is, and all that come later."""
        with self._lock:
            self._ended = cause
            calls, self._calls = self._calls, {}
        for call in calls.values():
            call.finish(None, again(cause))


class Trips:
    """The way there and back, and the difference of clocks, by pings. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[int, tuple[float, threading.Event]] = {}
        self._trips: deque[tuple[float, float]] = deque(maxlen=_KEPT_TRIPS)
        self._ended = False

    @property
    def best(self) -> tuple[float, float] | None:
        """Seconds of the shortest of the latest, and the clock there minus ours as it saw it;
        None before the first."""
        with self._lock:
            return min(self._trips, default=None)

    def begin(self, seq: int) -> threading.Event:
        """Set when that ping is answered, or never will be."""
        answered = threading.Event()
        with self._lock:
            if self._ended:
                answered.set()
            else:
                self._sent[seq] = (monotonic_s(), answered)
        return answered

    def finish(self, pong: wire.Pong) -> None:
        now_s, clock_s = monotonic_s(), time.time()
        with self._lock:
            sent = self._sent.pop(pong.seq, None)
            if sent is None:
                return
            trip_s = now_s - sent[0]
            self._trips.append((trip_s, pong.clock_s - (clock_s - trip_s / 2)))
        sent[1].set()

    def end(self) -> None:
        with self._lock:
            self._ended = True
            sent, self._sent = self._sent, {}
        for _, answered in sent.values():
            answered.set()


def again(cause: HostError) -> HostError:
    """The same error for one more caller: each raises its own."""
    return HostError(cause.message, hint=cause.hint)
