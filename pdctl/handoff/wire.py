"""What travels between sender and receiver: a fixed header, then a body. One decoder.

    magic 4s · version u8 · kind u8 · reserved u16 · room u64 · page u32 · first_layer u16 ·
    layers u16 · length u32 · checksum u64                            (36 bytes, little-endian)

The body is msgpack, but for Pages, whose body is the piece itself, and Hello, which starts
with the contract's fingerprint so that it can be compared before anything else is decoded.
Placed stands for Pages where the receiver reads the piece itself, out of the sender's memory, and
Spread for many of them, in a device's.
`checksum` is XXH3-64 of the body, seeded with that of the header before it.

Everything here raises ProtocolViolation for bytes that cannot be, and allocates nothing that
a peer's length asks for before the length was checked.
"""

from __future__ import annotations

import enum
import struct
from typing import Annotated, Any

import msgspec
from xxhash import xxh3_64_intdigest

from pdctl.errors import ProtocolViolation
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.ticket import MAX_CHARS
from pdctl.topology.contract import PROTOCOL

MAGIC = b"pdcH"
MAX_BODY_BYTES = 4096
MAX_CARD_BYTES = 60 << 10
"""A NIXL agent's metadata: 460 bytes on one machine, more with every network device."""
MAX_DETAIL_CHARS = 500
MAX_ASKED = 100
"""Keys of pages in one frame."""
MAX_SPREAD = 128
"""Spots in one frame."""
NONCE_BYTES = 32

_PREFIX = struct.Struct("<4sBBHQIHHI")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _PREFIX.size + _CHECKSUM.size

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Address = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, msgspec.Meta(max_length=128)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Kind(enum.IntEnum):
    CHALLENGE = 1
    ANSWER = 2
    PROOF = 3
    HELLO = 4
    OFFER = 5
    GRANT = 6
    PAGES = 7
    END = 8
    DONE = 9
    ABORT = 10
    RENEW = 11
    PLACED = 12
    TAKEN = 13
    ASK = 14
    COUNTED = 15
    SPREAD = 16


PIECES = frozenset({Kind.PAGES, Kind.PLACED})
"""Kinds whose header names layers of a page."""


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Base of every body."""


class Challenge(Message, frozen=True, kw_only=True):
    """Sender, once per connection."""

    nonce: Nonce


class Answer(Message, frozen=True, kw_only=True):
    """Receiver: its own nonce, and its proof over both."""

    nonce: Nonce
    proof: Digest


class Proof(Message, frozen=True, kw_only=True):
    """Sender: its proof over both nonces and its card, which says how its memory is read; empty
    where it can't be."""

    proof: Digest
    card: Annotated[bytes, msgspec.Meta(max_length=MAX_CARD_BYTES)] = b""


class Hello(Message, frozen=True, kw_only=True):
    """Receiver, once per handoff; the fingerprint stands before it. `reads`: it takes pieces out
    of the sender's memory itself, told of each by Placed instead of Pages."""

    decode: Name
    ticket: Annotated[str, msgspec.Meta(max_length=MAX_CHARS)]
    reads: bool = False


class Offer(Message, frozen=True, kw_only=True):
    """Sender: the pages are reserved. `pages` holds `tokens`, whose ids have that SHA-256."""

    tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
    token_sha256: Digest
    pages: Count


class Grant(Message, frozen=True, kw_only=True):
    """Receiver: it wants positions [held_tokens, tokens).

    That is pages held_tokens // 64 onward; the first slot is held_tokens % 64 in the first of
    them and 0 in every other.
    """

    tokens: Count
    held_tokens: Count
    first_token: bool


class Placed(Message, frozen=True, kw_only=True):
    """Sender: the piece that the header names lies there until End. `xxh3` is its XXH3-64."""

    address: Address
    device: Count
    xxh3: Annotated[int, msgspec.Meta(ge=0)]


class Spot(msgspec.Struct, frozen=True, array_like=True):
    """Where the same layers of one or more consecutive pages lie: the first one's at the address,
    each of the others' a page's bytes behind the one before it."""

    page: Count
    first_layer: Count
    layers: Count
    address: Address
    pages: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)] = 1


class Spread(Message, frozen=True, kw_only=True):
    """Sender: pieces lie there until End, in a device's memory. They are not hashed."""

    device: Count
    spots: Annotated[tuple[Spot, ...], msgspec.Meta(min_length=1, max_length=MAX_SPREAD)]


class Taken(Message, frozen=True, kw_only=True):
    """Receiver: that many pieces of this handoff were read, all told. End comes after the last
    of them, so that what was read before End was the sender's to show."""

    pieces: Count


class Ask(Message, frozen=True, kw_only=True):
    """One host's page store to another's: how many of the leading keys it has; with `any` the
    place of the first that it has, counted from 1; with `pages` those pages, then End."""

    keys: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MAX_ASKED)]
    any: bool = False
    pages: bool = False


class Counted(Message, frozen=True, kw_only=True):
    count: Count


class End(Message, frozen=True, kw_only=True):
    """Sender: that many pages were sent; the token where it was wanted."""

    pages: Count
    first_token: Count | None


class Done(Message, frozen=True, kw_only=True):
    """Receiver: everything is committed."""


class Abort(Message, frozen=True, kw_only=True):
    """Either end: nothing will be committed. `cause` is one of `HANDOFF_CAUSES`."""

    cause: Name
    detail: Annotated[str, msgspec.Meta(max_length=MAX_DETAIL_CHARS)]


class Renew(Message, frozen=True, kw_only=True):
    """Either end: still there. `tokens` positions are computed so far; from a receiver, are
    received: what the sender's kernel still holds is not delivered, and may take long."""

    tokens: Count


BODIES: dict[Kind, type[Message]] = {
    Kind.CHALLENGE: Challenge,
    Kind.ANSWER: Answer,
    Kind.PROOF: Proof,
    Kind.HELLO: Hello,
    Kind.OFFER: Offer,
    Kind.GRANT: Grant,
    Kind.END: End,
    Kind.DONE: Done,
    Kind.ABORT: Abort,
    Kind.RENEW: Renew,
    Kind.PLACED: Placed,
    Kind.TAKEN: Taken,
    Kind.ASK: Ask,
    Kind.COUNTED: Counted,
    Kind.SPREAD: Spread,
}

_MOST_BYTES = {Kind.PROOF: MAX_CARD_BYTES + MAX_BODY_BYTES}
_KINDS: dict[type[Message], Kind] = {body: kind for kind, body in BODIES.items()}
_DECODERS: dict[Kind, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(body) for kind, body in BODIES.items()
}
_encoder = msgspec.msgpack.Encoder()


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """A checked header. `page`, `first_layer` and `layers` are zero but for Pages."""

    kind: Kind
    room: int
    page: int
    first_layer: int
    layers: int
    length: int
    checksum: int
    seed: int


Part = Header | Spot
"""Which layers of which page."""


def frame(message: Message, room: int = 0, *, fingerprint: str = "") -> bytes:
    """Header and body of everything but Pages; `fingerprint` is Hello's."""
    body = _encoder.encode(message)
    if isinstance(message, Hello):
        text = fingerprint.encode()
        body = bytes((len(text),)) + text + body
    return _header(_KINDS[type(message)], room, 0, 0, 0, memoryview(body)) + body


def piece_header(room: int, page: int, first_layer: int, layers: int, piece: memoryview) -> bytes:
    """The header of Pages; the piece itself follows it, from where it lies."""
    return _header(Kind.PAGES, room, page, first_layer, layers, piece)


def placed_frame(room: int, page: int, first_layer: int, layers: int, placed: Placed) -> bytes:
    """Header and body of Placed."""
    body = _encoder.encode(placed)
    return _header(Kind.PLACED, room, page, first_layer, layers, memoryview(body)) + body


def _header(
    kind: Kind, room: int, page: int, first_layer: int, layers: int, body: memoryview
) -> bytes:
    prefix = _PREFIX.pack(MAGIC, PROTOCOL, kind, 0, room, page, first_layer, layers, body.nbytes)
    return prefix + _CHECKSUM.pack(xxh3_64_intdigest(body, xxh3_64_intdigest(prefix)))


def read_header(raw: bytes | bytearray | memoryview, geometry: PageGeometry) -> Header:
    """Checks `HEADER_BYTES` bytes from a peer."""
    prefix = bytes(raw[: _PREFIX.size])
    magic, version, number, reserved, room, page, first, layers, length = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise ProtocolViolation("the peer does not speak pdctl's handoff protocol")
    if version != PROTOCOL:
        raise ProtocolViolation(
            f"the peer speaks protocol {version}, this replica {PROTOCOL}",
            hint="run the same pdctl on both",
        )
    if reserved != 0 or number not in Kind.__members__.values():
        raise ProtocolViolation(f"unknown message kind {number}")
    kind = Kind(number)
    if kind in PIECES:
        check_layers(first, layers, geometry)
    if kind is Kind.PAGES:
        if length != layers * geometry.layer_bytes:
            raise ProtocolViolation(f"a piece of {layers} layers is not {length} bytes")
    elif length > _MOST_BYTES.get(kind, MAX_BODY_BYTES) or (
        kind is not Kind.PLACED and any((page, first, layers))
    ):
        raise ProtocolViolation(f"malformed header of {kind.name}")
    (checksum,) = _CHECKSUM.unpack(raw[_PREFIX.size : HEADER_BYTES])
    return Header(
        kind=kind,
        room=room,
        page=page,
        first_layer=first,
        layers=layers,
        length=length,
        checksum=checksum,
        seed=xxh3_64_intdigest(prefix),
    )


def check_layers(first: int, layers: int, geometry: PageGeometry) -> None:
    """Raises ProtocolViolation where a page has none such."""
    if not 1 <= layers <= geometry.layers - first:
        raise ProtocolViolation(f"layers {first} to {first + layers} are not in a page")


def check_body(header: Header, body: bytes | memoryview) -> None:
    """Compares the checksum; call it before the body is used."""
    if xxh3_64_intdigest(body, header.seed) != header.checksum:
        raise corrupted(header)


def corrupted(header: Header) -> ProtocolViolation:
    return ProtocolViolation(f"a {header.kind.name} of room {header.room} was corrupted")


def read_body(header: Header, body: bytes) -> Message:
    """The message of a checked header, but for Pages; for Hello without its fingerprint."""
    check_body(header, body)
    return _decode(header.kind, body)


def read_hello(header: Header, body: bytes) -> tuple[str, bytes]:
    """Hello's fingerprint, and the rest, still undecoded."""
    check_body(header, body)
    end = 1 + body[0] if body else 0
    if not 1 < end <= len(body):
        raise ProtocolViolation("a Hello without a fingerprint")
    return body[1:end].decode("utf-8", "replace"), body[end:]


def hello_rest(rest: bytes) -> Hello:
    """Decodes what `read_hello` left."""
    message = _decode(Kind.HELLO, rest)
    assert isinstance(message, Hello)
    return message


def _decode(kind: Kind, body: bytes) -> Message:
    try:
        message: Message = _DECODERS[kind].decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(f"malformed {kind.name}: {error}") from error
    return message
