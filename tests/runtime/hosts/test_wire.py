from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.runtime.hosts import wire

MESSAGES: list[wire.Message] = [
    wire.Hello(pdctl_version="1", python_version="3", uid=1, boot="b"),
    wire.Request(id=1, operation="run", body=b"\x00" * 10),
    wire.Answer(id=1, body=b""),
    wire.Failure(id=2, kind="HostError", message="m", hint=None),
    wire.Progress(id=3, done=1, whole=2),
    wire.Ping(seq=4),
    wire.Pong(seq=4, clock_s=1.5),
]


@given(st.lists(st.integers(1, 40), max_size=30))
def test_messages_arrive_however_the_bytes_are_cut(cuts: list[int]) -> None:
    """A pipe keeps order, not boundaries."""
    raw = b"".join(wire.encode(message) for message in MESSAGES)
    incoming = wire.Incoming()
    found: list[wire.Message] = []
    for size in [*cuts, len(raw)]:
        found += incoming.feed(raw[:size])
        raw = raw[size:]
    assert found == MESSAGES


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_garbled(raw: bytes) -> None:
    """Nothing but Garbled comes out of bytes that no far end sends."""
    found: list[wire.Any] = []
    with contextlib.suppress(wire.Garbled):
        found = wire.Incoming().feed(raw)
    assert all(isinstance(message, wire.Message) for message in found)


def test_a_frame_has_a_bound() -> None:
    """A length that nobody means is refused before anything is kept for it."""
    with pytest.raises(wire.Garbled, match="a frame of 4294967295 bytes"):
        wire.Incoming().feed(b"\xff\xff\xff\xff")


def test_a_body_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts without an end do not fill the memory."""
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 1 << 20)
    part = wire.encode(wire.Part(id=1, chunk=bytes(wire.PART_BYTES)))
    incoming = wire.Incoming()
    for _ in range((1 << 20) // wire.PART_BYTES):
        incoming.feed(part)
    with pytest.raises(wire.Garbled, match="more than 1 MiB"):
        incoming.feed(part)


@pytest.mark.parametrize("noise", [b"", b"Welcome!\r\n", wire.MAGIC[:5] + b"x", b"\x00" * 1000])
def test_what_comes_before_the_magic_is_skipped(noise: bytes) -> None:
    """A greeting from the remote shell's own files does no harm, whatever it is."""
    opening = wire.Opening()
    raw = noise + wire.MAGIC + b"after"
    rest = b""
    opened = False
    for at in range(len(raw)):
        piece = raw[at : at + 1]
        if opened:
            rest += piece
            continue
        after = opening.feed(piece)
        opened = after is not None
    assert rest == b"after"
    assert opening.noise == noise


def test_a_shell_that_never_stops_printing_is_given_up() -> None:
    """Bounded: it is no far end."""
    opening = wire.Opening()
    assert opening.feed(b"yes\n" * (16 << 10)) is None
    with pytest.raises(wire.Garbled, match="64 KiB"):
        opening.feed(b"yes\n")


@pytest.fixture
def pipe() -> Iterator[tuple[int, wire.Outgoing]]:
    reader, writer = os.pipe()
    outgoing = wire.Outgoing(writer)
    yield reader, outgoing
    outgoing.close()
    os.close(reader)


def test_a_short_message_passes_a_long_one(pipe: tuple[int, wire.Outgoing]) -> None:
    """10 MB go in parts, and a ping that is sent meanwhile comes before their end."""
    reader, outgoing = pipe
    body = os.urandom(10 << 20)
    long = threading.Thread(target=outgoing.send, args=(wire.Answer(id=1, body=body),), daemon=True)
    long.start()
    incoming = wire.Incoming()
    found: list[wire.Message] = []
    read = 0
    while len(found) < 2:
        chunk = os.read(reader, 1 << 16)
        if read < 1 << 20 <= read + len(chunk):
            outgoing.send(wire.Ping(seq=7), wait=False)
        read += len(chunk)
        found += incoming.feed(chunk)
    long.join(10)
    assert found == [wire.Ping(seq=7), wire.Answer(id=1, body=body)]


def test_a_full_pipe_holds_up_only_who_waits(pipe: tuple[int, wire.Outgoing]) -> None:
    """With nobody reading, a ping is queued at once, and closing frees whoever waits."""
    _, outgoing = pipe
    ended = threading.Event()

    def fill() -> None:
        with pytest.raises(BrokenPipeError):
            outgoing.send(wire.Answer(id=1, body=bytes(8 << 20)))
        ended.set()

    threading.Thread(target=fill, daemon=True).start()
    outgoing.send(wire.Ping(seq=1), wait=False)
    assert not ended.wait(0.1)
    outgoing.close()
    assert ended.wait(10)


def test_a_reader_that_went_away_is_noticed() -> None:
    """The pipe breaks: sending is refused from then on."""
    reader, writer = os.pipe()
    outgoing = wire.Outgoing(writer)
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        outgoing.send(wire.Answer(id=1, body=bytes(64 << 20)))
