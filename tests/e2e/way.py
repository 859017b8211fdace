"""What is done to the link between the two ends of a pair, and to the port that its sender
listens on: the same for every pair of engines."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from e2e import data_link
from e2e.data_link import DataLink, Edit, Frame
from e2e.faults import ANSWER_S, SILENCE_S, Ledger, Mending, Request

from pdctl.handoff import wire
from pdctl.handoff.handshake import answer
from pdctl.handoff.link import Link
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.ticket import mint
from pdctl.handoff.transport.tcp import TcpTransport

HELD_PAGES = 3

EDITS: dict[str, Edit] = {
    "cut inside a page": data_link.cut_off,
    "a page truncated": data_link.truncated,
    "a page duplicated": data_link.duplicated,
    "a page missing": data_link.skipped,
    "two pages reordered": data_link.Reordered(),
    "a page of 2 GiB announced": data_link.oversized,
    "a bit of a page flipped": data_link.flipped,
    "garbage for a page": data_link.garbage,
}
"""Of frames to the receiver."""


class Way(msgspec.Struct, frozen=True):
    """A pair whose pages go through a link of the test's.

    Args:
        prompt: of ten pages.
        expected: what an engine alone makes of it.
        name: before its rows in the ledger.
    """

    cluster: Mending
    link: DataLink
    path: str
    prompt: str
    expected: str
    ledger: Ledger
    name: str = ""

    @property
    def prefill(self) -> str:
        return self.path.partition(">")[0]

    @property
    def decode(self) -> str:
        return self.path.partition(">")[2]

    def ask(self, max_tokens: int = 4) -> Request:
        return Request(self.cluster, self.prompt, path=self.path, max_tokens=max_tokens)

    def held(self, max_tokens: int = 4) -> Request:
        """A request that stands still after some of its pages."""
        self.link.hold(HELD_PAGES)
        request = self.ask(max_tokens)
        assert self.link.held.wait(20), request.answer
        return request

    def told(self, request: Request, since_s: float, within_s: float = ANSWER_S) -> float:
        """An error object before any token, in time, that names a leg and its replica."""
        took_s = request.told(since_s=since_s, within_s=within_s)
        assert request.status in (502, 503, 504)
        assert not request.text
        names = (("prefill", self.prefill), ("decode", self.decode))
        legs = [f'{leg} replica "{name}"' for leg, name in names]
        assert any(leg in request.answer for leg in legs), request.answer
        return took_s

    def recovered(self) -> int:
        return self.cluster.recovered(self.prompt, self.expected, self.path)

    def row(self, fault: str, answer: str, took_s: float | None, left: int) -> None:
        named = f"{self.name}, {fault}" if self.name else fault
        self.ledger.row(named, answer, took_s, left)
        assert left == 0

    # -- faults of the link

    def broken(self, fault: str) -> None:
        """Frames to the receiver are wrong (`EDITS`)."""
        pids = [r["pid"] for r in self.cluster.status()["replicas"]]
        self.link.to_decode = EDITS[fault]
        request = self.ask()
        took_s = self.told(request, request.began_s)
        self.row(f"data link: {fault}", request.answer, took_s, self.recovered())
        assert [r["pid"] for r in self.cluster.status()["replicas"]] == pids

    def grant_broken(self) -> None:
        """What the receiver says is noise."""
        self.link.to_prefill = data_link.garbled_grant
        request = self.ask()
        took_s = self.told(request, request.began_s)
        left = self.recovered()
        self.row("data link: garbage for the receiver's grant", request.answer, took_s, left)

    def cut(self) -> None:
        request = self.held()
        cut_s = time.monotonic()
        self.link.cut()
        took_s = self.told(request, cut_s)
        left = self.recovered()
        self.row(f"data link: cut after {HELD_PAGES} pages", request.answer, took_s, left)

    def frozen(self) -> None:
        """5 s of silence end it at both ends, long before its deadline."""
        request = self.held()
        took_s = self.told(request, time.monotonic(), SILENCE_S)
        left = self.cluster.left(SILENCE_S)
        self.recovered()
        self.row(f"data link: frozen after {HELD_PAGES} pages", request.answer, took_s, left)

    # -- strangers at the sender's port

    def ticket_refused(self, made: Ticket, words: str) -> None:
        """A peer with the cluster's key, even, needs a ticket for its room."""
        digest = self.cluster.record().contract.digest
        room, ticket = made(self, secrets.randbits(60), digest)
        with self.proved() as link:
            began_s = time.monotonic()
            link.send(wire.Hello(decode=self.decode, ticket=ticket), room, fingerprint=digest)
            abort = refusal(link)
            took_s = time.monotonic() - began_s
        assert abort.cause == "ticket"
        assert words in abort.detail
        assert took_s < ANSWER_S
        told = f"Abort {abort.cause}: {abort.detail}"
        self.row(f"ticket: {made.__name__.replace('_', ' ')}", told, took_s, self.cluster.left())

    def replayed(self) -> None:
        """In mid-transfer and after it, byte for byte: the one for whom it was is not disturbed."""
        heard = Heard()
        self.link.hold(HELD_PAGES)
        self.link.to_prefill = heard
        request = self.ask(8)
        assert self.link.held.wait(20)
        during, during_s = self._replay(heard.hello)
        self.link.release()
        request.good(self.expected)
        after, after_s = self._replay(heard.hello)
        assert {during.cause, after.cause} == {"ticket"}
        assert max(during_s, after_s) < ANSWER_S
        left = self.recovered()
        for moment, abort, took_s in (("in a", during, during_s), ("after the", after, after_s)):
            told = f"Abort {abort.cause}: {abort.detail}"
            self.row(f"ticket replayed {moment} transfer", told, took_s, left)

    def _replay(self, hello: bytes) -> tuple[wire.Abort, float]:
        with self.proved() as link:
            began_s = time.monotonic()
            link.connection.send([memoryview(hello)])
            return refusal(link), time.monotonic() - began_s

    @contextmanager
    def proved(self) -> Iterator[Link]:
        """A connection to the sender that has proved the cluster's key: the strongest stranger."""
        geometry = PageGeometry.of(self.cluster.record().contract)
        connection = TcpTransport().dial(self.link.target, ANSWER_S)
        link = Link(connection, geometry, time.monotonic)
        try:
            answer(link, self.cluster.key())
            yield link
        finally:
            connection.unblock()
            connection.close()


def refusal(link: Link) -> wire.Abort:
    while True:
        header = link.read_header()
        message = link.read_message(header)
        if isinstance(message, wire.Abort):
            return message


class Heard:
    """Passes everything on, and keeps the last Hello."""

    def __init__(self) -> None:
        self.hello = b""

    def __call__(self, frame: Frame) -> Sequence[bytes]:
        if frame.kind is wire.Kind.HELLO:
            self.hello = frame.raw
        return (frame.raw,)


# -- tickets, each wrong: (room, ticket) of a way, a room and the contract's digest

Ticket = Callable[[Way, int, str], tuple[int, str]]


def another_key(way: Way, room: int, digest: str) -> tuple[int, str]:
    key = way.cluster.key()[::-1]
    return room, mint(key, room, way.prefill, way.decode, digest, time.time() + 60)


def expired(way: Way, room: int, digest: str) -> tuple[int, str]:
    key = way.cluster.key()
    return room, mint(key, room, way.prefill, way.decode, digest, time.time() - 1)


def another_room(way: Way, room: int, digest: str) -> tuple[int, str]:
    key = way.cluster.key()
    return room + 1, mint(key, room, way.prefill, way.decode, digest, time.time() + 60)


def another_receiver(way: Way, room: int, digest: str) -> tuple[int, str]:
    return room, mint(way.cluster.key(), room, way.prefill, "d9", digest, time.time() + 60)


def no_ticket(way: Way, room: int, digest: str) -> tuple[int, str]:
    return room, "let me in"


TICKETS = (
    (another_key, "not minted"),
    (expired, "expired"),
    (another_room, "not minted"),
    (another_receiver, "not minted"),
    (no_ticket, "malformed"),
)
"""Each, and what the refusal says."""
