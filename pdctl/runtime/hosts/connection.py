"""One far end, over the pipes of the process that leads to it: calls, liveness, the end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import selectors
import threading
from collections.abc import Callable
from typing import Any

from pdctl import __version__
from pdctl.errors import HostError
from pdctl.runtime.hosts import ssh, wire
from pdctl.runtime.hosts.operations import OPERATIONS, pack
from pdctl.runtime.hosts.pending import Call, Calls, Trips, again
from pdctl.runtime.hosts.tunnel import END_S, Tunnel
from pdctl.topology.model import Host
from pdctl.trace import monotonic_s

HELLO_S = 20.0
"""On top of ssh's own time to connect: authentication, the remote shell, Python's start."""
FIRST_PINGS = 5
log = logging.getLogger("pdctl.hosts")

_TICK_S = 0.5


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
        self._calls = Calls(host.name)
        self._trips = Trips()
        self._ids = itertools.count(1)
        self._opening = wire.Opening()
        try:
            self._tunnel = Tunnel(argv)
        except OSError as error:
            raise ssh.not_started(host, error) from error
        incoming, outgoing = self._tunnel.descriptors()
        self._out = wire.Outgoing(outgoing)
        self._reader = threading.Thread(
            target=self._run, args=(incoming,), name=f"host-{host.name}", daemon=True
        )
        self._reader.start()

    # -- what is known

    @property
    def pid(self) -> int:
        """Of the process that leads there, and of its group."""
        return self._tunnel.pid

    @property
    def ending(self) -> bool:
        """Whether nothing more can be asked, though `lost` may not be set yet."""
        return self._out.closed

    @property
    def boot(self) -> str | None:
        """Of the machine there; None before its first word."""
        heard = self._hello.done() and self._hello.exception() is None
        return self._hello.result().boot if heard else None

    @property
    def round_trip_s(self) -> float | None:
        """The shortest of the latest pings; None before the first."""
        best = self._trips.best
        return None if best is None else best[0]

    @property
    def clock_offset_s(self) -> float | None:
        """Its clock minus ours, as the ping with the shortest way saw it."""
        best = self._trips.best
        return None if best is None else best[1]

    # -- use

    def establish(self) -> None:
        """Waits for the far end's first word, and measures the way to it.

        Raises:
            HostError: why there is none; or it is another version's. Nothing is left then.
        """
        try:
            hello = self._hello.result(max(0.0, self._hello_until_s - monotonic_s()) + 5 * END_S)
            if hello.pdctl_version != __version__:
                raise ssh.other_version(self._host, hello.pdctl_version)
            for _ in range(FIRST_PINGS):
                self._ping().wait(wire.PING_S)
        except TimeoutError:
            self.close()
            raise ssh.explain(self._host, None, self._tunnel.said()) from None
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
            self._calls.forget(request)
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
        self._reader.join(END_S)
        if self._reader.is_alive():
            self._tunnel.kill()
            self._reader.join(2 * END_S)

    # -- sending

    def _send(
        self,
        operation: str,
        arguments: tuple[object, ...],
        progress: Callable[[int, int], None] | None,
        *,
        wait: bool,
    ) -> tuple[int, Call]:
        call = Call(OPERATIONS[operation].answer, progress)
        request = next(self._ids)
        message = wire.Request(id=request, operation=operation, body=pack(arguments))
        self._calls.add(request, call)
        try:
            self._out.send(message, wait=wait)
        except BrokenPipeError:
            if wait:
                self.lost.wait(5 * END_S)
            self._calls.forget(request)
            raise again(self.cause or self._closed()) from None
        call.heard_s = monotonic_s()
        return request, call

    def _closed(self) -> HostError:
        return HostError(f'host "{self._host.name}": the connection is closed')

    def _ping(self) -> threading.Event:
        seq = next(self._ids)
        answered = self._trips.begin(seq)
        with contextlib.suppress(BrokenPipeError):
            self._out.send(wire.Ping(seq=seq), wait=False)
        return answered

    # -- its own threads

    def _run(self, incoming: int) -> None:
        wrong: str | None = None
        try:
            wrong = self._read(incoming)
        except wire.Garbled as error:
            wrong = str(error)
        except Exception as error:  # whoever waits must hear of it, whatever it is
            log.exception("host=%s", self._host.name)
            wrong = f"unexpected {type(error).__name__}"
        finally:
            os.close(incoming)
        self._finish(wrong)

    def _read(self, descriptor: int) -> str | None:
        """Until the end; why it is one, where that is not "end of file"."""
        incoming = wire.Incoming(self._calls.heard)
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

    def _take(self, message: wire.Any) -> None:
        match message:
            case wire.Hello():
                if self._hello.done():
                    raise wire.Garbled("a second Hello")
                self._hello.set_result(message)
            case wire.Pong():
                self._trips.finish(message)
            case wire.Progress():
                call = self._calls.heard(message.id)
                if call is not None and call.progress is not None:
                    call.progress(message.done, message.whole)
            case wire.Answer() | wire.Failure():
                self._calls.settle(message)
            case _:
                raise wire.Garbled(f"a {type(message).__name__} from the far end")

    # -- the end

    def _finish(self, wrong: str | None) -> None:
        """Ends the process, then everything that waits for it."""
        self._out.close()
        returncode = self._tunnel.reap(at_once=wrong is not None)
        self.cause = self._explain(wrong, returncode)
        self._calls.end(self.cause)
        self._trips.end()
        self.lost.set()
        if not self._hello.done():
            self._hello.set_exception(self.cause)
        elif self.on_lost is not None and not self._closing:
            self.on_lost(self.cause)

    def _explain(self, wrong: str | None, returncode: int | None) -> HostError:
        name, said = self._host.name, self._tunnel.said()
        if self._closing:
            return self._closed()
        if not self._hello.done():
            noise = self._opening.noise.decode(errors="replace")
            wrong = wrong or "its output ended"
            return ssh.explain(self._host, returncode, said, noise=noise, wrong=wrong)
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        why = wrong or (lines[-1] if lines else "it ended")
        return HostError(
            f'host "{name}": the connection was lost ({why})',
            hint="`pdctl doctor` tests the way to it",
        )
