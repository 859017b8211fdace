"""A stand-in for the agent that a replica attaches to."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pdctl.engines.channel import (
    Assignment,
    Attach,
    Failed,
    Message,
    Poll,
    Ready,
    Report,
    ToAgent,
    encode,
)
from pdctl.handoff.counters import Counters

WAIT_S = 60.0


class StubAgent:
    """Assigns, polls and records what one replica says; can go away and come back."""

    def __init__(self, path: Path, assignment: Assignment) -> None:
        self.path = path
        self.assignment = assignment
        self.ready: Ready | None = None
        self.attached = 0
        self.failures: list[Failed] = []
        self._reports: dict[int, Counters] = {}
        self._seq = 0
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        self.listen()

    def listen(self) -> None:
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def go_away(self) -> None:
        self.ready = None
        # wakes accept, which would take one more connection
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._connection is not None:
            self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()

    def counters(self) -> Counters:
        with self._changed:
            self._seq += 1
            assert self._connection is not None
            self._connection.sendall(encode(Poll(seq=self._seq)))
            seq = self._seq
            assert self._changed.wait_for(lambda: seq in self._reports, WAIT_S)
            return self._reports.pop(seq)

    def wait(self, what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: getattr(self, what), WAIT_S), what

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._connection = connection
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        decoder = msgspec.msgpack.Decoder(ToAgent)
        stream = connection.makefile("rb")
        while (prefix := _read_or_end(stream, 4)) is not None:
            body = _read_or_end(stream, int.from_bytes(prefix, "little"))
            if body is None:
                return
            self._take(connection, decoder.decode(body))

    def _take(self, connection: socket.socket, message: Message) -> None:
        with self._changed:
            if isinstance(message, Attach):
                self.attached += 1
                connection.sendall(encode(self.assignment))
            elif isinstance(message, Ready):
                self.ready = message
            elif isinstance(message, Failed):
                self.failures.append(message)
            elif isinstance(message, Report):
                self._reports[message.seq] = message.counters
            self._changed.notify_all()


def _read_or_end(stream: Any, length: int) -> bytes | None:
    try:
        found = stream.read(length)
    except (OSError, ValueError):
        return None
    return found if len(found) == length else None
