"""The engine's end of `channel.py`: attached to its agent for as long as both live.

One thread dials, reads and redials. An engine outlives its agent: while the socket is away it
keeps serving, failures are kept (the latest `KEPT_FAILURES`), and the agent that comes back
gets Attach, then Ready again, then those. Standard library and msgspec only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, Self, TypeVar

import msgspec

from pdctl import __version__
from pdctl.engines.channel import (
    MAX_FRAME_BYTES,
    REPLICA_ENV,
    SOCKET_ENV,
    Assignment,
    Attach,
    Failed,
    Message,
    Poll,
    Refused,
    Report,
    StoreAssignment,
    StoreReport,
    ToEngine,
    ToStore,
    encode,
)
from pdctl.errors import LaunchError, UsageError
from pdctl.handoff.counters import Counters
from pdctl.handoff.store.shelves import StoreCounts

log = logging.getLogger("pdctl.engines")

ATTACH_TIMEOUT_S = 20.0
"""How long an engine's process waits for its assignment."""
KEPT_FAILURES = 256
FAILED_TIMEOUT_S = 0.5
"""Far below the silence after which a peer of a handoff is taken for dead."""
SEND_TIMEOUT_S = 5.0
REDIAL_FIRST_S = 0.1
REDIAL_MOST_S = 2.0

_decoder: msgspec.msgpack.Decoder[ToEngine | ToStore] = msgspec.msgpack.Decoder(ToEngine | ToStore)

Counts = TypeVar("Counts", Counters, StoreCounts)


class Attaching(Generic[Counts]):
    """Dials, is assigned, then reports.

    `open` first, once; then any method from any thread; `close` last. `counters` is called on
    the attachment's own thread for every Poll. `superseded` is called there too, when an agent
    that came back assigns something else than what this process loaded: it should exit.
    """

    kind = "engine"

    def __init__(
        self,
        path: str,
        name: str,
        *,
        counters: Callable[[], Counts],
        superseded: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._attach = Attach(kind=self.kind, name=name, pid=os.getpid(), version=__version__)
        self._counters: Callable[[], Counters | StoreCounts] = counters
        self._superseded = superseded
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._assigned: Assignment | StoreAssignment | None = None
        self._ready: Message | None = None
        self._failures: deque[Failed] = deque(maxlen=KEPT_FAILURES)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def from_environment(
        cls,
        environment: Mapping[str, str],
        *,
        counters: Callable[[], Counts],
        superseded: Callable[[], None] = lambda: None,
    ) -> Self:
        """Raises UsageError where the process was not started by an agent."""
        try:
            path, name = environment[SOCKET_ENV], environment[REPLICA_ENV]
        except KeyError as missing:
            raise UsageError(
                f"{missing.args[0]} is not set", hint="engines are started by `pdctl up`"
            ) from None
        return cls(path, name, counters=counters, superseded=superseded)

    def _open(self, timeout_s: float) -> Assignment | StoreAssignment:
        try:
            connection, assignment = self._dial(timeout_s)
        except (OSError, msgspec.DecodeError) as error:
            raise LaunchError(f"no agent answers at {self._path}: {error}") from error
        self._assigned = assignment
        self._socket = connection
        self._thread = threading.Thread(target=self._run, name="attachment", daemon=True)
        self._thread.start()
        return assignment

    def ready(self, message: Message) -> None:
        with self._lock:
            self._ready = message
            self._send(message)

    def failed(self, message: Failed) -> None:
        """Called from the handoff's threads, which a frozen agent must not hold up."""
        with self._lock:
            if not self._send(message, FAILED_TIMEOUT_S):
                self._failures.append(message)

    def close(self) -> None:
        """Ends the connection and the thread; bounded."""
        self._closed.set()
        with self._lock:
            if self._socket is not None:
                _shut(self._socket)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(REDIAL_MOST_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            connection = self._socket or self._redial()
            if connection is None:
                return
            try:
                while True:
                    self._answer(_receive(connection))
            except (OSError, msgspec.DecodeError) as error:
                with self._lock:
                    self._socket = None
                connection.close()
                if not self._closed.is_set():
                    log.warning("the agent went away (%s); serving on", error or "end of stream")

    def _answer(self, message: ToEngine | ToStore) -> None:
        if isinstance(message, Poll):
            counted = self._counters()
            report = (
                Report(seq=message.seq, counters=counted)
                if isinstance(counted, Counters)
                else StoreReport(seq=message.seq, counts=counted)
            )
            with self._lock:
                self._send(report)

    def _redial(self) -> socket.socket | None:
        pause_s = REDIAL_FIRST_S
        while not self._closed.wait(pause_s * random.uniform(0.5, 1.0)):
            pause_s = min(2 * pause_s, REDIAL_MOST_S)
            try:
                connection, assignment = self._dial(SEND_TIMEOUT_S)
            except (OSError, msgspec.DecodeError, LaunchError) as error:
                log.debug("agent still away: %s", error)
                continue
            if assignment != self._assigned:
                log.error("the agent assigns something else now; ending")
                connection.close()
                self._superseded()
                return None
            self._resume(connection)
            return connection
        return None

    def _resume(self, connection: socket.socket) -> None:
        with self._lock:
            self._socket = connection
            if self._ready is not None:
                self._send(self._ready)
            while self._failures and self._send(self._failures[0]):
                self._failures.popleft()

    def _dial(self, timeout_s: float) -> tuple[socket.socket, Assignment | StoreAssignment]:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(self._path)
            connection.sendall(encode(self._attach))
            answer = _receive(connection)
            if isinstance(answer, Refused):
                raise LaunchError(f"the agent refuses {self._attach.name}: {answer.reason}")
            if isinstance(answer, Poll):
                raise OSError(f"{type(answer).__name__} came before Assignment")
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection, answer

    def _send(self, message: Message, timeout_s: float = SEND_TIMEOUT_S) -> bool:
        """Under the lock. False when the agent is away; the reading thread notices the rest."""
        if self._socket is None:
            return False
        try:
            _send_within(self._socket, encode(message), timeout_s)
        except OSError:
            _shut(self._socket)
            return False
        return True


class Attachment(Attaching[Counters]):
    """A replica's."""

    def open(self, timeout_s: float) -> Assignment:
        """Dials once and waits for the Assignment.

        Raises:
            LaunchError: no agent answers, or it refuses this replica.
        """
        assigned = self._open(timeout_s)
        if not isinstance(assigned, Assignment):
            raise LaunchError("the agent takes this replica for a page store")
        return assigned


class StoreAttachment(Attaching[StoreCounts]):
    """A page store's."""

    kind = "store"

    def open_store(self, timeout_s: float) -> StoreAssignment:
        """As `Attachment.open`."""
        assigned = self._open(timeout_s)
        if not isinstance(assigned, StoreAssignment):
            raise LaunchError("the agent takes this page store for a replica")
        return assigned


def _send_within(connection: socket.socket, frame: bytes, timeout_s: float) -> None:
    """`settimeout` would bound the reading thread too; SO_SNDTIMEO bounds sending alone."""
    timeval = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
    connection.sendall(frame)


def _receive(connection: socket.socket) -> ToEngine | ToStore:
    length = int.from_bytes(_exactly(connection, 4), "little")
    if length > MAX_FRAME_BYTES:
        raise OSError(f"a frame of {length} bytes")
    return _decoder.decode(_exactly(connection, length))


def _exactly(connection: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = connection.recv(min(length, 1 << 16))
        if not part:
            raise ConnectionResetError("end of stream")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
