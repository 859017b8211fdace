"""Peers that a test speaks for, frame by frame, on the real transports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from handoff.ends import DIGEST, KEY, SMALL, Leg

from pdctl.handoff import wire
from pdctl.handoff.handshake import answer, challenge
from pdctl.handoff.link import Link
from pdctl.handoff.page import Patterns
from pdctl.handoff.transport.interface import Listener, Transport


@contextmanager
def raw_link(transport: Transport, port: int) -> Iterator[Link]:
    """A connection to a sender that has said nothing yet."""
    link = Link(transport.dial(("127.0.0.1", port), 5.0), SMALL, time.monotonic)
    try:
        yield link
    finally:
        link.connection.unblock()
        link.connection.close()


@contextmanager
def proved_link(transport: Transport, port: int) -> Iterator[Link]:
    """A connection to a sender, both keys proved."""
    with raw_link(transport, port) as link:
        answer(link, KEY)
        yield link


def say_hello(link: Link, leg: Leg) -> None:
    link.send(wire.Hello(decode=leg.decode, ticket=leg.ticket), leg.room, fingerprint=DIGEST)


def hear(link: Link) -> wire.Message:
    """The next message that is not Renew."""
    while True:
        message = link.read_message(link.read_header())
        if not isinstance(message, wire.Renew):
            return message


class FakeSender:
    """Listens like a sender; serves one receiver as the test says."""

    def __init__(self, transport: Transport) -> None:
        self._listener: Listener = transport.listen(("127.0.0.1", 0))
        self.port = self._listener.port

    @contextmanager
    def accept(self, *, key: bytes = KEY) -> Iterator[Link]:
        connection = self._listener.accept()
        assert connection is not None
        link = Link(connection, SMALL, time.monotonic)
        try:
            challenge(link, key)
            yield link
        finally:
            connection.unblock()
            connection.close()

    def close(self) -> None:
        self._listener.close()
        while self._listener.accept() is not None:
            pass


def hear_hello(link: Link) -> int:
    """Its room."""
    header = link.read_header()
    wire.hello_rest(wire.read_hello(header, link.read_body(header))[1])
    return header.room


def send_page(link: Link, room: int, pages: Patterns, page: int, first: int = 0, layers: int = 2):
    piece = memoryview(pages[page, first : first + layers].tobytes())
    link.send_piece(room, page, first, piece)
