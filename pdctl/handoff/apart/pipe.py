"""Lists of calls over a Unix socket between two processes of one host."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from pdctl.handoff.apart.calls import Call
from pdctl.trace import monotonic_s

GATHER_S = 0.0003
"""What a call waits for others where the last ones have just been said: each time that the engine's
process is woken costs its interpreter more than the call does."""
STUCK_S = 10.0
"""A process that reads nothing for so long, while its socket is full, counts as gone."""
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

Heard = TypeVar("Heard", bound=Call)


class Gone(Exception):
    """The other process has ended, or is stuck."""


class Pipe(Generic[Heard]):
    """Any thread says, one thread hears.

    Args:
        heard: the union that the other process says.
    """

    def __init__(self, connected: socket.socket, heard: Any) -> None:
        seconds, rest = divmod(STUCK_S, 1.0)
        timeout = struct.pack("ll", int(seconds), int(rest * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._socket = connected
        self._read = connected.makefile("rb")
        self._decoder = msgspec.msgpack.Decoder(list[heard])
        self._saying = threading.Lock()

    def say(self, calls: Sequence[Call]) -> None:
        """All of them or, where it raises Gone, none for certain. Waits `STUCK_S` at most."""
        with self._saying:
            self._say(calls)

    def say_unless_busy(self, calls: Sequence[Call]) -> bool:
        """As `say`, also where this thread may be inside that already, as a finalizer may; False
        where anybody is."""
        if not self._saying.acquire(blocking=False):
            return False
        try:
            self._say(calls)
        finally:
            self._saying.release()
        return True

    def _say(self, calls: Sequence[Call]) -> None:
        body = _encoder.encode(calls)
        try:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            self.end()
            raise Gone(f"it takes nothing: {error.strerror or error}") from error

    def hear(self) -> list[Heard]:
        """Blocks for the next. Raises Gone at the end."""
        try:
            head = self._read.read(_LENGTH.size)
            body = self._read.read(*_LENGTH.unpack(head)) if len(head) == _LENGTH.size else b""
        except OSError as error:
            raise Gone(f"it says nothing: {error.strerror or error}") from error
        if not body:
            raise Gone("it has ended")
        calls: list[Heard] = self._decoder.decode(body)
        return calls

    def end(self) -> None:
        """Wakes whoever hears, at both ends. Any thread, any number of times."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Only when nobody hears any more."""
        self._read.close()
        self._socket.close()


class Outbox:
    """Says what it is given, in order, on a thread of its own, so that no caller ever waits."""

    def __init__(self, pipe: Pipe[Any]) -> None:
        self._pipe = pipe
        self._given: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pdctl-outbox", daemon=True)
        self._thread.start()

    def put(self, call: Call) -> None:
        self._given.put(call)

    def close(self, timeout_s: float) -> None:
        """What was given is said first."""
        self._given.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        more, said_s = True, 0.0
        while more:
            calls = [self._given.get()]
            if monotonic_s() - said_s < GATHER_S:
                time.sleep(GATHER_S)
            with contextlib.suppress(queue.Empty):
                while True:
                    calls.append(self._given.get_nowait())
            more = None not in calls
            try:
                self._pipe.say([call for call in calls if call is not None])
            except Gone:
                return
            said_s = monotonic_s()
