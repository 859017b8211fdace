"""A client's connections to its store: one anchor, and one more per call under way."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

from pdctl.handoff.arena import Bytes
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.store import frames
from pdctl.handoff.store.memory import PageMemory
from pdctl.handoff.store.preparing import Preparing
from pdctl.trace import monotonic_s

log = logging.getLogger("pdctl.store")

DIAL_S = 1.0
ANSWER_S = 1.0
"""For an answer, on top of what the call itself may wait."""
SILENT_S = 5.0
"""A store that did not answer in time is not asked for that long: its prompts do not wait."""
KEPT_HERE: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
"""No process that an engine starts inherits the memory; macOS has no such flag."""
REDIAL_FIRST_S = 0.1
REDIAL_MOST_S = 2.0

R = TypeVar("R", bound=frames.Frame)


class StoreLost(Exception):
    """The store is away, late, or not ours. Ends in the client: callers see a miss."""


class Attached:
    """One life of a store, as a client sees it: its memory, and connections to it."""

    def __init__(
        self,
        path: str,
        enter: frames.Enter,
        anchor: socket.socket,
        memory: PageMemory,
        lock: Callable[[Bytes], None] | None = None,
    ) -> None:
        self.memory = memory
        self._preparing = Preparing(memory, lock)
        self._path = path
        self._enter = msgspec.structs.replace(enter, anchor=False)
        self._anchor = anchor
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._silent_until_s = 0.0
        self.lost = False

    def ask(
        self,
        request: frames.Frame,
        answer: type[R],
        timeout_s: float = 0.0,
        *,
        silent_too: bool = False,
    ) -> R | None:
        """One request; None where the answer is another, which is a plain refusal.

        Args:
            silent_too: also of a store that has just been silent.

        Raises:
            StoreLost: no answer within `timeout_s` and `ANSWER_S`.
        """
        if self.lost:
            raise StoreLost("it is away")
        if monotonic_s() < self._silent_until_s and not silent_too:
            raise StoreLost("it was silent")
        connection: socket.socket | None = None
        try:
            connection = self._take()
            connection.settimeout(timeout_s + ANSWER_S)
            connection.sendall(frames.encode(request))
            reply = frames.read_reply(connection)
        except (OSError, msgspec.DecodeError) as error:
            if connection is not None:
                connection.close()
            if isinstance(error, TimeoutError):
                self._silent_until_s = monotonic_s() + SILENT_S
            raise StoreLost(str(error)) from error
        self._put(connection)
        if isinstance(reply, frames.Lent):
            self._preparing.backed(reply.backed)
        return reply if isinstance(reply, answer) else None

    def wait(self) -> None:
        """Until the store goes away, or `close`."""
        with contextlib.suppress(OSError):
            self._anchor.settimeout(None)
            self._anchor.recv(1)
        self.close()

    def close(self) -> None:
        """Any thread, any number of times."""
        self.lost = True
        for connection in (self._anchor, *self._drain()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._preparing.close()

    def _take(self) -> socket.socket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        connection = _dial(self._path)
        try:
            connection.sendall(frames.encode(self._enter))
            if not isinstance(frames.read_reply(connection), frames.Entered):
                raise OSError("it does not know this client")
        except BaseException:
            connection.close()
            raise
        return connection

    def _put(self, connection: socket.socket) -> None:
        """Kept, however many: the end of a connection ends what it lent last."""
        with self._lock:
            if not self.lost:
                self._idle.append(connection)
                return
        connection.close()

    def _drain(self) -> list[socket.socket]:
        with self._lock:
            found, self._idle = self._idle, []
        return found


def attach(
    path: str,
    contract: str,
    geometry: PageGeometry,
    lock: Callable[[Bytes], None] | None = None,
) -> Attached:
    """Raises StoreLost where none answers, or it refuses this client for good."""
    enter = frames.Enter(
        client=secrets.token_bytes(frames.CLIENT_BYTES),
        contract=contract,
        page_bytes=geometry.page_bytes,
        anchor=True,
    )
    anchor: socket.socket | None = None
    try:
        anchor = _dial(path)
        anchor.sendall(frames.encode(enter))
        begun, descriptors, _, _ = socket.recv_fds(anchor, frames.MAX_FRAME_BYTES, 1, KEPT_HERE)
        try:
            reply = frames.read_reply(anchor, begun)
            if isinstance(reply, frames.Refused):
                log.error("the store refuses this replica: %s", reply.reason)
                raise OSError(reply.reason)
            if not isinstance(reply, frames.Entered) or not descriptors:
                raise OSError("it sent no memory")
            memory = PageMemory(descriptors[0], reply.slots, geometry)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
    except (OSError, msgspec.DecodeError, ValueError) as error:
        if anchor is not None:
            anchor.close()
        raise StoreLost(str(error)) from error
    return Attached(path, enter, anchor, memory, lock)


def _dial(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(DIAL_S)
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection
