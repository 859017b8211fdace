"""What a replica and its host's store say to each other, on a Unix socket of mode 0600.

Frames: 4 bytes little-endian length, then one msgpack message. Each request has one answer, in
order; a replica opens as many connections as it has calls under way.

    replica                     store
      Enter (anchor)    →
                        ←       Entered, with the descriptor of the memory; or Refused
      Enter             →                                      every further connection
                        ←       Entered
      Hold, Tail        →
                        ←       Lent
      Release           →
                        ←       Answered
      Held              →
                        ←       Counted
      Reserve           →
                        ←       Granted; Answered(ok=False) where there is no room
      Commit            →
                        ←       Answered

Leases belong to the client, and end with its anchor.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from pdctl.handoff.store.index import Wanted
from pdctl.handoff.store.keys import KEY_BYTES

MAX_KEYS = 2048
"""In one frame; more are split (R47)."""
MAX_FRAME_BYTES = 1 << 17
FRAME_S = 5.0
"""From a frame's first byte to its last."""
CLIENT_BYTES = 16

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Keys = Annotated[tuple[Key, ...], msgspec.Meta(max_length=MAX_KEYS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=600)]


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Base of all."""


class Enter(Frame, frozen=True, kw_only=True):
    client: Annotated[bytes, msgspec.Meta(min_length=CLIENT_BYTES, max_length=CLIENT_BYTES)]
    """Random, one per client."""
    contract: str
    page_bytes: int
    anchor: bool = False
    """The first connection, on which nothing else is said."""


class Hold(Frame, frozen=True, kw_only=True):
    keys: Keys
    timeout_s: Seconds
    others: bool
    """Whether other hosts' stores may be asked for what is not here."""
    lease: int | None = None
    """That the pages are added to; None: a new one."""
    parent: Key | None = None
    """The page before the first."""


class Tail(Frame, frozen=True, kw_only=True):
    """The first of these that is held is added to the lease: `Lent` has its slot, or none."""

    lease: int
    keys: Keys
    timeout_s: Seconds
    parent: Key | None = None


class Release(Frame, frozen=True, kw_only=True):
    lease: int


class Held(Frame, frozen=True, kw_only=True):
    keys: Keys


class Reserve(Frame, frozen=True, kw_only=True):
    keys: Keys
    parent: Key | None = None


class Commit(Frame, frozen=True, kw_only=True):
    """`keys` are written; whatever else the lease has reserved does not come."""

    lease: int
    keys: Keys


class Entered(Frame, frozen=True, kw_only=True):
    slots: int


class Refused(Frame, frozen=True, kw_only=True):
    reason: str


class Lent(Frame, frozen=True, kw_only=True):
    lease: int
    slots: tuple[int, ...]
    place: int = 0
    """Of a tail, among the keys that were asked for."""
    backed: int = 0
    """Of the store's first slots, as many have memory."""


class Counted(Frame, frozen=True, kw_only=True):
    pages: int


class Granted(Frame, frozen=True, kw_only=True):
    lease: int
    wanted: tuple[Wanted, ...]
    evicted: int


class Answered(Frame, frozen=True, kw_only=True):
    ok: bool


Request = Enter | Hold | Tail | Release | Held | Reserve | Commit
Reply = Entered | Refused | Lent | Counted | Granted | Answered

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def batches(keys: Sequence[bytes]) -> Iterator[tuple[int, tuple[bytes, ...]]]:
    """(place of the first, keys) of what fits into one frame each (R47)."""
    for at in range(0, len(keys), MAX_KEYS):
        yield at, tuple(keys[at : at + MAX_KEYS])


def encode(message: Frame) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def read_request(connection: socket.socket) -> Request:
    """Waits for a frame, however long; once it has begun, `FRAME_S`.

    Raises:
        OSError: the end of the stream, or of that time.
        msgspec.DecodeError: what came is no request.
    """
    connection.settimeout(None)
    head = _exactly(connection, 1)
    connection.settimeout(FRAME_S)
    return _requests.decode(_body(connection, head))


def read_reply(connection: socket.socket, begun: bytes = b"") -> Reply:
    """Within the connection's own time limit. Raises as `read_request`.

    Args:
        begun: what of it was received already.
    """
    return _replies.decode(_body(connection, begun))


def _body(connection: socket.socket, begun: bytes) -> bytes:
    head = begun[:4] + _exactly(connection, 4 - len(begun[:4]))
    length = int.from_bytes(head, "little")
    if length > MAX_FRAME_BYTES:
        raise OSError(f"a frame of {length} bytes")
    return begun[4:] + _exactly(connection, length - len(begun[4:]))


def _exactly(connection: socket.socket, length: int) -> bytes:
    parts = []
    while length > 0:
        part = connection.recv(length)
        if not part:
            raise ConnectionResetError("end of stream")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
