"""What a command and a far end say to each other over two pipes; frames, no meaning.

    near (ours)                 far (`far_end.py`)
                        ←       MAGIC, then Hello     whatever comes before MAGIC is skipped
      Request           →                             many at once, told apart by `id`
                        ←       Progress              of a long one, any number
                        ←       Answer or Failure     exactly one per Request
      Ping              →                             every 5 s, and a few at first
                        ←       Pong

Frames: 4 bytes little-endian length, then one msgpack message. What is long travels as `Part`s
before the Request or Answer that ends it, so that nothing waits behind 50 MB of a file.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from collections.abc import Callable

import msgspec

MAGIC = b"\x00\x01pdctl far end\x01\x00"
MAX_NOISE_BYTES = 64 << 10
"""What a remote shell may print (a greeting, say) before the far end speaks."""
MAX_FRAME_BYTES = 1 << 20
PART_BYTES = 128 << 10
MAX_BODY_BYTES = 1 << 30
PING_S = 5.0
SILENCE_S = 15.0
"""Without a byte from the far end for so long, a connection is dead."""
LEASE_S = 30.0
"""Without a byte from the near end for so long, a far end ends itself."""

_HEADER = struct.Struct("<I")
_QUEUED_BYTES = 1 << 20


class Garbled(Exception):
    """Bytes that no far end of any version sends; the text is the sentence."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Base of all: frozen, tagged with its class's name."""


class Hello(Message, frozen=True, kw_only=True):
    """What every version of pdctl says first; fields may be added, never changed."""

    pdctl_version: str
    python_version: str
    uid: int
    boot: str
    """As `machine.boot` tells it: another after every reboot."""


class Part(Message, frozen=True, kw_only=True):
    id: int
    chunk: bytes


class Request(Message, frozen=True, kw_only=True):
    id: int
    operation: str
    body: bytes
    """The end of the arguments' msgpack (`operations.py`)."""


class Answer(Message, frozen=True, kw_only=True):
    id: int
    body: bytes


class Failure(Message, frozen=True, kw_only=True):
    id: int
    kind: str
    """The error's class."""
    message: str
    hint: str | None = None


class Progress(Message, frozen=True, kw_only=True):
    id: int
    done: int
    whole: int


class Ping(Message, frozen=True, kw_only=True):
    seq: int


class Pong(Message, frozen=True, kw_only=True):
    seq: int
    clock_s: float
    """Unix seconds there."""


Any = Hello | Part | Request | Answer | Failure | Progress | Ping | Pong
_decoder = msgspec.msgpack.Decoder(Any)


def encode(message: Message) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(body)) + body


class Opening:
    """Skips what comes before MAGIC. Not thread-safe."""

    def __init__(self) -> None:
        self.noise = b""

    def feed(self, chunk: bytes) -> bytes | None:
        """What follows MAGIC; None while it has not come. Garbled past MAX_NOISE_BYTES."""
        self.noise += chunk
        before, found, after = self.noise.partition(MAGIC)
        if found:
            self.noise = before
            return after
        if len(self.noise) > MAX_NOISE_BYTES:
            raise Garbled(f"more than {MAX_NOISE_BYTES >> 10} KiB of something else come first")
        return None


class Incoming:
    """Bytes in, messages out, with their parts put together. Not thread-safe.

    Args:
        on_part: told of every part, with its request's id.
    """

    def __init__(self, on_part: Callable[[int], object] = lambda _: None) -> None:
        self._on_part = on_part
        self._rest = bytearray()
        self._parts: dict[int, bytearray] = {}

    def feed(self, chunk: bytes) -> list[Any]:
        """The messages that are complete now, without `Part`s. Raises Garbled."""
        self._rest += chunk
        found: list[Any] = []
        at = 0
        while len(self._rest) - at >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._rest, at)
            if length > MAX_FRAME_BYTES:
                raise Garbled(f"a frame of {length} bytes")
            end = at + _HEADER.size + length
            if len(self._rest) < end:
                break
            message = self._whole(bytes(self._rest[at + _HEADER.size : end]))
            if message is not None:
                found.append(message)
            at = end
        del self._rest[:at]
        return found

    def _whole(self, frame: bytes) -> Any | None:
        try:
            message = _decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise Garbled(f"a frame that is no message ({error})") from None
        if isinstance(message, Part):
            parts = self._parts.setdefault(message.id, bytearray())
            parts += message.chunk
            self._on_part(message.id)
            if len(parts) > MAX_BODY_BYTES:
                raise Garbled(f"a message of more than {MAX_BODY_BYTES >> 20} MiB")
        elif isinstance(message, Request | Answer) and message.id in self._parts:
            body = bytes(self._parts.pop(message.id)) + message.body
            return msgspec.structs.replace(message, body=body)
        elif isinstance(message, Failure):
            self._parts.pop(message.id, None)
        return None if isinstance(message, Part) else message


class Outgoing:
    """Writes messages to a pipe from a thread of its own, so that a full pipe holds up nobody
    who does not ask for it. Thread-safe; owns the descriptor.

    Args:
        first: bytes that go before any message.
    """

    def __init__(self, descriptor: int, *, first: bytes = b"") -> None:
        self._descriptor = descriptor
        self._queue: deque[bytes] = deque([first] if first else [])
        self._queued = len(first)
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="outgoing", daemon=True)
        self._thread.start()

    def send(self, message: Message, *, wait: bool = True) -> None:
        """Queues a message, long bodies in parts.

        Args:
            wait: whether to wait while much is queued already; ends when the pipe breaks.

        Raises:
            BrokenPipeError: nobody reads any more.
        """
        for piece in _pieces(message):
            frame = encode(piece)
            with self._changed:
                while wait and self._queued > _QUEUED_BYTES and not self._closed:
                    self._changed.wait()
                if self._closed:
                    raise BrokenPipeError("the connection is closed")
                self._queue.append(frame)
                self._queued += len(frame)
                self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Sends what is queued, then closes the descriptor. Does not wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while (frame := self._next()) is not None:
                view = memoryview(frame)
                while view:
                    view = view[os.write(self._descriptor, view) :]
        except OSError:
            self.close()
        finally:
            os.close(self._descriptor)

    def _next(self) -> bytes | None:
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            if not self._queue:
                return None
            frame = self._queue.popleft()
            self._queued -= len(frame)
            self._changed.notify_all()
            return frame


def _pieces(message: Message) -> list[Message]:
    if not isinstance(message, Request | Answer) or len(message.body) <= PART_BYTES:
        return [message]
    body = message.body
    last = (len(body) - 1) // PART_BYTES * PART_BYTES
    parts: list[Message] = [
        Part(id=message.id, chunk=body[at : at + PART_BYTES]) for at in range(0, last, PART_BYTES)
    ]
    return [*parts, msgspec.structs.replace(message, body=body[last:])]
