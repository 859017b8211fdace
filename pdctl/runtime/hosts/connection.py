"""One far end, over the pipes of the process that leads to it: calls, liveness, the end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pdctl import __version__
from pdctl.errors import HostError
from pdctl.runtime import process
from pdctl.runtime.hosts import ssh, wire
from pdctl.runtime.hosts.operations import OPERATIONS, failed, pack, unpack
from pdctl.topology.model import Host
from pdctl.trace import monotonic_s

HELLO_S = 20.0
"""On top of ssh's own time to connect: authentication, the remote shell, Python's start."""
FIRST_PINGS = 5
_TICK_S = 0.5
_KEPT_STDERR_BYTES = 8 << 10
_KEPT_TRIPS = 12
_END_S = 1.0
"""For each step of ending: by itself, then killed."""


class _Call:
    def __init__(self, answer: Any, progress: Callable[[int, int], None] | None) -> None:
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.kind = answer
        self.progress = progress
        self.heard_s = monotonic_s()


class Connection:
    """Starts the process at once; `establish` returns when the far end has answered.

    Any thread may use it. Its own thread reads, pings, notices the end, and fails what is in
    flight; nothing else waits for the process. Once lost it stays lost.

    Args:
        argv: what leads to the far end; its stdin and stdout are the connection.
        hello_s: from here to the far end's first word.
        silence_s: without a byte for so long, it is lost.
    """

    def __init__(
        self,
        host: Host,
        argv: tuple[str, ...],
        *,
        hello_s: float = HELLO_S,
        silence_s: float = wire.SILENCE_S,
    ) -> None:
        self.lost = threading.Event()
        self.on_lost: Callable[[HostError], None] | None = None
        self.cause: HostError | None = None
        self._host = host
        self._hello: concurrent.futures.Future[wire.Hello] = concurrent.futures.Future()
        self._hello_until_s = monotonic_s() + hello_s
        self._silence_s = silence_s
        self._closing = False
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count(1)
        self._pings: dict[int, tuple[float, threading.Event]] = {}
        self._trips: deque[tuple[float, float]] = deque(maxlen=_KEPT_TRIPS)
        self._stderr = b""
        self._opening = wire.Opening()
        self._process = self._start(argv)
        assert self._process.stdin is not None
        self._out = wire.Outgoing(os.dup(self._process.stdin.fileno()))
        self._process.stdin.close()
        self._stderr_thread = threading.Thread(target=self._listen, daemon=True)
        self._reader = threading.Thread(target=self._run, name=f"host-{host.name}", daemon=True)
        self._stderr_thread.start()
        self._reader.start()

    # -- what is known

    @property
    def pid(self) -> int:
        """Of the process that leads there, and of its group."""
        return self._process.pid

    @property
    def hello(self) -> wire.Hello:
        return self._hello.result(0)

    @property
    def round_trip_s(self) -> float | None:
        """The shortest of the latest pings; None before the first."""
        return min(self._trips)[0] if self._trips else None

    @property
    def clock_offset_s(self) -> float | None:
        """Its clock minus ours, as the ping with the shortest way saw it."""
        return min(self._trips)[1] if self._trips else None

    # -- use

    def establish(self) -> None:
        """Waits for the far end's first word, and measures the way to it.

        Raises:
            HostError: why there is none; or it is another version's. Nothing is left then.
        """
        try:
            hello = self._hello.result(max(0.0, self._hello_until_s - monotonic_s()) + 5 * _END_S)
            if hello.pdctl_version != __version__:
                raise ssh.other_version(self._host, hello.pdctl_version)
            for _ in range(FIRST_PINGS):
                self._ping().wait(wire.PING_S)
        except TimeoutError:
            self.close()
            raise ssh.explain(self._host, None, self._said()) from None
        except BaseException:
            self.close()
            raise
        if self.cause is not None:
            raise self.cause

    def call(
        self,
        operation: str,
        *arguments: object,
        patience_s: float,
        progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """Asks and waits: at most `patience_s` after the last sign of this very call.

        Raises:
            HostError: the connection was lost, or nothing came in time. What was asked may
                have happened all the same.
        """
        request, call = self._send(operation, arguments, progress, wait=True)
        while True:
            left_s = call.heard_s + patience_s - monotonic_s()
            try:
                return call.future.result(max(0.0, left_s))
            except TimeoutError:
                if left_s > 0:
                    continue
            with self._lock:
                self._calls.pop(request, None)
            raise HostError(
                f'host "{self._host.name}": no answer to {operation} within {patience_s:g} s'
            )

    def submit(self, operation: str, *arguments: object) -> concurrent.futures.Future[Any]:
        """Asks, and never waits. HostError in the future, or at once when it is lost."""
        return self._send(operation, arguments, None, wait=False)[1].future

    def close(self) -> None:
        """Ends the far end and the process; bounded. Calls in flight fail. Idempotent."""
        self._closing = True
        self._out.close()
        self._reader.join(_END_S)
        if self._reader.is_alive():
            self._kill()
            self._reader.join(2 * _END_S)

    # -- sending

    def _send(
        self,
        operation: str,
        arguments: tuple[object, ...],
        progress: Callable[[int, int], None] | None,
        *,
        wait: bool,
    ) -> tuple[int, _Call]:
        call = _Call(OPERATIONS[operation].answer, progress)
        request = next(self._ids)
        with self._lock:
            if self.lost.is_set():
                raise self._again()
            self._calls[request] = call
        message = wire.Request(id=request, operation=operation, body=pack(arguments))
        try:
            self._out.send(message, wait=wait)
        except BrokenPipeError:
            self.lost.wait(5 * _END_S)
            raise self._again() from None
        call.heard_s = monotonic_s()
        return request, call

    def _again(self) -> HostError:
        """The cause, for one more caller."""
        cause = self.cause or HostError(f'host "{self._host.name}": the connection is closed')
        return HostError(cause.message, hint=cause.hint)

    def _ping(self) -> threading.Event:
        seq = next(self._ids)
        answered = threading.Event()
        with self._lock:
            if self.lost.is_set():
                answered.set()
                return answered
            self._pings[seq] = (time.monotonic(), answered)
        with contextlib.suppress(BrokenPipeError):
            self._out.send(wire.Ping(seq=seq), wait=False)
        return answered

    # -- its own threads

    def _start(self, argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **ssh.ENVIRONMENT}
        environment.pop(process.ACTOR_KEY_ENV, None)
        try:
            return subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise ssh.not_started(self._host, error) from error

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream, contextlib.suppress(OSError):
            while chunk := os.read(stream.fileno(), 1 << 12):
                self._stderr = (self._stderr + chunk)[-_KEPT_STDERR_BYTES:]

    def _said(self) -> str:
        return self._stderr.decode(errors="replace")

    def _run(self) -> None:
        assert self._process.stdout is not None
        wrong: str | None = None
        with self._process.stdout as stream:
            try:
                wrong = self._read(stream.fileno())
            except wire.Garbled as error:
                wrong = str(error)
            self._finish(wrong)

    def _read(self, descriptor: int) -> str | None:
        """Until the end; why it is one, where that is not "end of file"."""
        incoming = wire.Incoming(self._heard_of)
        opened = False
        heard_s = pinged_s = monotonic_s()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while True:
                chunk = b""
                if selector.select(_TICK_S):
                    chunk = os.read(descriptor, 1 << 16)
                    if not chunk:
                        return None
                    heard_s = monotonic_s()
                if chunk and not opened:
                    after = self._opening.feed(chunk)
                    opened, chunk = after is not None, after or b""
                for message in incoming.feed(chunk) if chunk else ():
                    self._take(message)
                now_s = monotonic_s()
                if not self._hello.done():
                    if now_s > self._hello_until_s:
                        return "nothing answered in time"
                    continue
                if now_s - heard_s > self._silence_s:
                    return f"nothing was heard for {self._silence_s:g} s"
                if now_s - pinged_s > min(wire.PING_S, self._silence_s / 3):
                    pinged_s = now_s
                    self._ping()

    def _heard_of(self, request: int) -> None:
        with self._lock:
            call = self._calls.get(request)
        if call is not None:
            call.heard_s = monotonic_s()

    def _take(self, message: wire.Any) -> None:
        match message:
            case wire.Hello():
                if self._hello.done():
                    raise wire.Garbled("a second Hello")
                self._hello.set_result(message)
            case wire.Pong():
                self._measure(message)
            case wire.Progress():
                self._heard_of(message.id)
                with self._lock:
                    call = self._calls.get(message.id)
                if call is not None and call.progress is not None:
                    call.progress(message.done, message.whole)
            case wire.Answer() | wire.Failure():
                with self._lock:
                    call = self._calls.pop(message.id, None)
                if call is not None:
                    self._settle(call, message)
            case _:
                raise wire.Garbled(f"a {type(message).__name__} from the far end")

    def _settle(self, call: _Call, message: wire.Answer | wire.Failure) -> None:
        if not call.future.set_running_or_notify_cancel():
            return
        if isinstance(message, wire.Failure):
            call.future.set_exception(failed(self._host.name, message))
            return
        try:
            call.future.set_result(unpack(message.body, call.kind))
        except ValueError as error:  # msgspec's: the far end is not what it says
            name = self._host.name
            call.future.set_exception(HostError(f'host "{name}": an answer is garbled: {error}'))

    def _measure(self, pong: wire.Pong) -> None:
        now_s, clock_s = time.monotonic(), time.time()
        with self._lock:
            sent = self._pings.pop(pong.seq, None)
        if sent is not None:
            trip_s = now_s - sent[0]
            self._trips.append((trip_s, pong.clock_s - (clock_s - trip_s / 2)))
            sent[1].set()

    # -- the end

    def _finish(self, wrong: str | None) -> None:
        """Ends the process, then everything that waits for it."""
        self._out.close()
        returncode = self._reap(at_once=wrong is not None)
        self._stderr_thread.join(_END_S)
        self.cause = self._explain(wrong, returncode)
        with self._lock:
            self.lost.set()
            calls, self._calls = self._calls, {}
            pings, self._pings = self._pings, {}
        for _, answered in pings.values():
            answered.set()
        for call in calls.values():
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(self._again())
        if not self._hello.done():
            self._hello.set_exception(self.cause)
        elif self.on_lost is not None and not self._closing:
            self.on_lost(self.cause)

    def _reap(self, *, at_once: bool) -> int | None:
        """Its own exit code; None where it had to be ended."""
        if not at_once:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(_END_S)
        self._kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        return None

    def _kill(self) -> None:
        """The process and what it started to get there (a jump host's ssh, say)."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _explain(self, wrong: str | None, returncode: int | None) -> HostError:
        name = self._host.name
        if self._closing:
            return HostError(f'host "{name}": the connection is closed')
        if not self._hello.done():
            noise = self._opening.noise.decode(errors="replace")
            wrong = wrong or "its output ended"
            return ssh.explain(self._host, returncode, self._said(), noise=noise, wrong=wrong)
        said = [line.strip() for line in self._said().splitlines() if line.strip()]
        why = wrong or (said[-1] if said else "it ended")
        return HostError(
            f'host "{name}": the connection was lost ({why})',
            hint="`pdctl doctor` tests the way to it",
        )
