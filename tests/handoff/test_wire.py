"""Frames: what is accepted, and that nothing else gets further than the decoder."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.errors import ProtocolViolation
from pdctl.handoff import wire
from pdctl.handoff.page import PageGeometry

GEOMETRY = PageGeometry(3, 1, 4)
PIECE = bytes(range(256)) * (GEOMETRY.layer_bytes // 256)

counts = st.integers(0, (1 << 32) - 1)
digests = st.binary(min_size=32, max_size=32)
addresses = st.integers(0, (1 << 62) - 1)
spots = st.builds(wire.Spot, counts, counts, counts, addresses, st.integers(1, (1 << 32) - 1))
messages = st.one_of(
    st.builds(
        wire.Spread,
        device=counts,
        spots=st.lists(spots, min_size=1, max_size=wire.MAX_SPREAD).map(tuple),
    ),
    st.builds(wire.Challenge, nonce=digests),
    st.builds(wire.Answer, nonce=digests, proof=digests),
    st.builds(wire.Proof, proof=digests),
    st.builds(wire.Offer, tokens=st.integers(1, 1 << 20), token_sha256=digests, pages=counts),
    st.builds(wire.Grant, tokens=counts, held_tokens=counts, first_token=st.booleans()),
    st.builds(wire.End, pages=counts, first_token=st.none() | counts),
    st.builds(wire.Done),
    st.builds(wire.Abort, cause=st.text(max_size=20), detail=st.text(max_size=100)),
    st.builds(wire.Renew, tokens=counts),
)


def parse(raw: bytes) -> object:
    """As a link does: a header, a body of the length that it names, the message."""
    if len(raw) < wire.HEADER_BYTES:
        raise ProtocolViolation("short")
    header = wire.read_header(raw[: wire.HEADER_BYTES], GEOMETRY)
    assert header.length <= max(wire.MAX_BODY_BYTES, GEOMETRY.page_bytes)
    body = raw[wire.HEADER_BYTES : wire.HEADER_BYTES + header.length]
    if header.kind is wire.Kind.PAGES:
        wire.check_body(header, body)
        return header
    if header.kind is wire.Kind.HELLO:
        fingerprint, rest = wire.read_hello(header, body)
        return fingerprint, wire.hello_rest(rest)
    return wire.read_body(header, body)


def test_a_frame_of_as_many_pieces_as_there_may_be_is_heard() -> None:
    """With the largest of all numbers: it stays within what a body may have."""
    last = (1 << 32) - 1
    spot = wire.Spot(last, last, last, (1 << 62) - 1, last)
    spread = wire.Spread(device=last, spots=(spot,) * wire.MAX_SPREAD)
    assert parse(wire.frame(spread, 1)) == spread


def piece(page: int = 0, first: int = 0, layers: int = 1) -> bytes:
    body = PIECE * layers
    return wire.piece_header(5, page, first, layers, memoryview(body)) + body


@given(messages, st.integers(0, (1 << 62) - 1))
@settings(deadline=None)
def test_every_message_comes_back(message, room):
    """Encoding and decoding are inverse, and the room travels in the header."""
    raw = wire.frame(message, room)
    assert parse(raw) == message
    assert wire.read_header(raw[: wire.HEADER_BYTES], GEOMETRY).room == room


def test_a_hello_shows_its_fingerprint_before_anything_else_is_decoded():
    """DESIGN §6: the fingerprint is readable although the rest of Hello is not."""
    hello = wire.Hello(decode="d0", ticket="v1.1.a")
    raw = wire.frame(hello, 5, fingerprint="ab12")
    assert parse(raw) == ("ab12", hello)
    header = wire.read_header(raw[: wire.HEADER_BYTES], GEOMETRY)
    fingerprint, rest = wire.read_hello(header, raw[wire.HEADER_BYTES :])
    assert fingerprint == "ab12"
    with pytest.raises(ProtocolViolation):
        wire.hello_rest(rest[:-1])


def test_a_piece_names_its_page_and_layers():
    """A header of Pages says where the piece belongs."""
    header = parse(piece(page=7, first=1, layers=2))
    assert (header.room, header.page, header.first_layer, header.layers) == (5, 7, 1, 2)


@pytest.mark.parametrize("bit", range(0, 8 * wire.HEADER_BYTES, 5))
def test_no_bit_of_a_header_can_change_unnoticed(bit):
    """The checksum covers the header too: a page can't land at another's place."""
    raw = bytearray(piece(page=7, first=1, layers=1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolViolation):
        parse(bytes(raw))


def test_no_bit_of_a_piece_can_change_unnoticed():
    """R28: damaged pages are not committed."""
    raw = bytearray(piece())
    for at in (wire.HEADER_BYTES, len(raw) // 2, len(raw) - 1):
        raw[at] ^= 1
        with pytest.raises(ProtocolViolation, match="corrupted"):
            parse(bytes(raw))
        raw[at] ^= 1
    assert parse(bytes(raw))


def _header(**fields: int) -> bytes:
    return wire._PREFIX.pack(
        wire.MAGIC,
        fields.get("version", 1),
        fields.get("kind", wire.Kind.RENEW),
        0,
        5,
        fields.get("page", 0),
        fields.get("first", 0),
        fields.get("layers", 0),
        fields.get("length", 2),
    ) + bytes(8)


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 2},
        {"kind": 0},
        {"kind": 12},
        {"length": wire.MAX_BODY_BYTES + 1},
        {"length": (1 << 32) - 1},
        {"page": 1},
        {"kind": wire.Kind.PAGES, "layers": 1, "length": GEOMETRY.layer_bytes - 1},
        {"kind": wire.Kind.PAGES, "layers": 1, "length": (1 << 32) - 1},
        {"kind": wire.Kind.PAGES, "layers": 0, "length": 0},
        {"kind": wire.Kind.PAGES, "layers": 4, "length": 4 * GEOMETRY.layer_bytes},
        {"kind": wire.Kind.PAGES, "first": 3, "layers": 1, "length": GEOMETRY.layer_bytes},
        {"kind": wire.Kind.PAGES, "first": 65535, "layers": 2, "length": 2 * GEOMETRY.layer_bytes},
    ],
)
def test_lengths_and_kinds_are_checked_before_anything_is_allocated(fields):
    """R28, R29: a header that can't be is refused by itself, whatever would follow."""
    with pytest.raises(ProtocolViolation):
        wire.read_header(_header(**fields), GEOMETRY)


def test_another_version_is_named():
    """Two versions of pdctl say so instead of failing somewhere else."""
    with pytest.raises(ProtocolViolation, match="protocol 2, this replica 1"):
        wire.read_header(_header(version=2), GEOMETRY)


def test_mutated_frames_are_refused_or_valid():
    """20,000 damaged frames: each is a message or a ProtocolViolation, never anything else."""
    chance = random.Random(4)
    whole = [
        wire.frame(wire.Hello(decode="d0", ticket="v1.5." + "a" * 64), 5, fingerprint="ab" * 32),
        wire.frame(wire.Offer(tokens=65, token_sha256=bytes(32), pages=2), 5),
        wire.frame(wire.Grant(tokens=64, held_tokens=3, first_token=True), 5),
        wire.frame(wire.End(pages=2, first_token=70000), 5),
        wire.frame(wire.Abort(cause="expired", detail="too late"), 5),
        wire.frame(wire.Answer(nonce=bytes(32), proof=bytes(32))),
        piece(page=3, first=1, layers=2),
    ]
    refused = 0
    for _ in range(20_000):
        raw = bytearray(chance.choice(whole))
        for _ in range(chance.randint(1, 4)):
            if raw and chance.random() < 0.2:
                del raw[chance.randrange(len(raw)) :]
            if raw:
                raw[chance.randrange(len(raw))] = chance.randrange(256)
        try:
            parse(bytes(raw))
        except ProtocolViolation:
            refused += 1
    assert refused > 19_000


@given(st.binary(max_size=200), st.sampled_from(sorted(wire.BODIES)))
@settings(max_examples=500, deadline=None)
def test_bodies_with_a_right_checksum_are_still_checked(body, kind):
    """A peer that knows the format can't get past the types either."""
    raw = wire._header(kind, 5, 0, 0, 0, memoryview(body)) + body
    try:
        parse(raw)
    except ProtocolViolation:
        return
    assert body
