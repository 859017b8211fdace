"""Peers that may not be served, and prompts for which there is no room: real engines refuse
them, and others do not notice."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import pytest
from e2e.data_link import Frame
from e2e.far import HOSTS, FarCluster
from e2e.faults import ANSWER_S, Ledger, Request
from e2e.prompts import exact_prompt

from pdctl.handoff import wire
from pdctl.handoff.handshake import answer
from pdctl.handoff.link import Link
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.ticket import mint
from pdctl.handoff.transport.tcp import TcpTransport

pytestmark = [pytest.mark.engine, pytest.mark.ssh]

HELD_PAGES = 3
GARBAGE = (b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 4096, secrets.token_bytes(4096))
SILENT_AT_EACH = 8


@contextmanager
def proved(far: FarCluster) -> Iterator[Link]:
    """A connection to p0 that has proved the cluster's key: the strongest stranger."""
    geometry = PageGeometry.of(far.record().contract)
    connection = TcpTransport().dial(far.link.target, ANSWER_S)
    link = Link(connection, geometry, time.monotonic)
    try:
        answer(link, far.key())
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


Ticket = Callable[[bytes, int, str], tuple[int, str]]


def another_key(key: bytes, room: int, digest: str) -> tuple[int, str]:
    return room, mint(key[::-1], room, "p0", "d0", digest, time.time() + 60)


def expired(key: bytes, room: int, digest: str) -> tuple[int, str]:
    return room, mint(key, room, "p0", "d0", digest, time.time() - 1)


def another_room(key: bytes, room: int, digest: str) -> tuple[int, str]:
    return room + 1, mint(key, room, "p0", "d0", digest, time.time() + 60)


def another_receiver(key: bytes, room: int, digest: str) -> tuple[int, str]:
    return room, mint(key, room, "p0", "d9", digest, time.time() + 60)


def no_ticket(key: bytes, room: int, digest: str) -> tuple[int, str]:
    return room, "let me in"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (another_key, "not minted"),
        (expired, "expired"),
        (another_room, "not minted"),
        (another_receiver, "not minted"),
        (no_ticket, "malformed"),
    ],
)
def test_a_ticket_is_refused(far: FarCluster, ledger: Ledger, made: Ticket, words: str) -> None:
    """A peer with the cluster's key, even, needs a ticket for its room."""
    digest = far.record().contract.digest
    room, ticket = made(far.key(), secrets.randbits(60), digest)
    with proved(far) as link:
        began_s = time.monotonic()
        link.send(wire.Hello(decode="d0", ticket=ticket), room, fingerprint=digest)
        abort = refusal(link)
        took_s = time.monotonic() - began_s
    assert abort.cause == "ticket"
    assert words in abort.detail
    assert took_s < ANSWER_S
    name = made.__name__.replace("_", " ")
    ledger.row(f"ticket: {name}", f"Abort {abort.cause}: {abort.detail}", took_s, far.left())


class Heard:
    """Passes everything on, and keeps the last Hello."""

    def __init__(self) -> None:
        self.hello = b""

    def __call__(self, frame: Frame) -> Sequence[bytes]:
        if frame.kind is wire.Kind.HELLO:
            self.hello = frame.raw
        return (frame.raw,)


def replay(far: FarCluster, hello: bytes) -> tuple[wire.Abort, float]:
    with proved(far) as link:
        began_s = time.monotonic()
        link.connection.send([memoryview(hello)])
        return refusal(link), time.monotonic() - began_s


def test_a_ticket_is_replayed(far: FarCluster, ledger: Ledger, prompt: str, expected: str) -> None:
    """In mid-transfer and after it, byte for byte: the one for whom it was is not disturbed."""
    heard = Heard()
    far.link.hold(HELD_PAGES)
    far.link.to_prefill = heard
    request = Request(far, prompt, max_tokens=8)
    assert far.link.held.wait(20)
    during, during_s = replay(far, heard.hello)
    far.link.release()
    request.good(expected)
    after, after_s = replay(far, heard.hello)
    assert {during.cause, after.cause} == {"ticket"}
    assert max(during_s, after_s) < ANSWER_S
    left = far.recovered(prompt, expected)
    for moment, abort, took_s in (("in a", during, during_s), ("after the", after, after_s)):
        told = f"Abort {abort.cause}: {abort.detail}"
        ledger.row(f"ticket replayed {moment} transfer", told, took_s, left)


def open_ports(far: FarCluster) -> dict[tuple[str, int], str]:
    """Everything that the cluster listens on: address → what it is."""
    record = far.record()
    found = {far.link.target: "data"}
    for port in {port for host in HOSTS for port in record.plan.ports(host)}:
        if port != far.data_port:
            found["127.0.0.1", port] = "loopback"
    return found


def closes(connection: socket.socket, within_s: float) -> bool:
    """Whether the peer ends the connection, whatever it says before."""
    connection.settimeout(within_s)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def test_strangers_talk_garbage_at_every_port(
    far: FarCluster, ledger: Ledger, prompt: str, expected: str
) -> None:
    """Each is shown the door, or kept out; the cluster serves on, with the same processes."""
    pids = [r["pid"] for r in far.status()["replicas"]]
    ports = open_ports(far)
    took_s = 0.0
    for address in ports:
        for noise in GARBAGE:
            began_s = time.monotonic()
            with socket.create_connection(address, timeout=5) as connection:
                with suppress(OSError):  # it may be shown the door before the end
                    connection.sendall(noise)
                    connection.shutdown(socket.SHUT_WR)
                assert closes(connection, ANSWER_S), (address, noise[:20])
            took_s = max(took_s, time.monotonic() - began_s)
    left = far.recovered(prompt, expected)
    assert [r["pid"] for r in far.status()["replicas"]] == pids
    ledger.row(f"garbage at each of {len(ports)} ports", "closed", took_s, left)


def test_strangers_say_nothing_at_every_port(
    far: FarCluster, ledger: Ledger, prompt: str, expected: str
) -> None:
    """R38: requests pass by them; who proves nothing to the data port is out after 5 s."""
    with ExitStack() as silent:
        connections = {
            address: [
                silent.enter_context(socket.create_connection(address, timeout=5))
                for _ in range(SILENT_AT_EACH)
            ]
            for address in open_ports(far)
        }
        began_s = time.monotonic()
        for _ in range(3):
            Request(far, prompt, max_tokens=8).good(expected)
        assert all(closes(each, 8.0) for each in connections[far.link.target])
        took_s = time.monotonic() - began_s
    left = far.recovered(prompt, expected)
    told = "requests pass; the data port closes"
    ledger.row(f"{SILENT_AT_EACH} silent strangers at every port", told, took_s, left)


# -- the budget of p0: 16 pages, 1,024 tokens


def waiters(far: FarCluster) -> int:
    return int(far.replica("p0")["waiters"])


def test_a_prompt_over_the_whole_budget_is_refused(
    far: FarCluster, ledger: Ledger, prompt: str, expected: str
) -> None:
    """R40: before prefill, at once, and said why."""
    request = Request(far, exact_prompt(far.model_dir, 1100, seed=25))
    took_s = request.told("buffer of p0; the longest that does has 1024")
    assert request.status == 400
    left = far.recovered(prompt, expected)
    ledger.row("prompt over the whole budget", request.answer, took_s, left)


def test_prompts_wait_for_the_budget_in_order(far: FarCluster, ledger: Ledger) -> None:
    """R41: and one whose client goes away leaves its place."""
    prompts = [exact_prompt(far.model_dir, 900, seed=seed) for seed in (26, 27, 28)]
    alone = [Request(far, each, path="o0", max_tokens=8).good().text for each in prompts]
    far.link.hold(HELD_PAGES)
    began = [Request(far, prompts[0], max_tokens=8)]
    assert far.link.held.wait(20)
    with gone(far, prompts[1]):
        far.wait("one waits", lambda: waiters(far) == 1)
    far.wait("none waits", lambda: waiters(far) == 0)
    for number, each in enumerate(prompts[1:], start=1):
        began.append(Request(far, each, max_tokens=8))
        far.wait("it waits", lambda number=number: waiters(far) == number)  # type: ignore[misc]
    far.link.release()
    for request, text in zip(began, alone, strict=True):
        request.good(text)
    assert sorted(began, key=lambda r: r.ended_s) == began
    took_s = began[-1].ended_s - began[-1].began_s
    ledger.row("budget full: two wait, a third leaves", "200, whole, in order", took_s, far.left())


@contextmanager
def gone(far: FarCluster, prompt: str) -> Iterator[None]:
    """A client that asks, and closes its connection at the end of the block."""
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 4}).encode()
    host, _, port = far.bind.partition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\nx-pdctl-path: p0>d0\r\n\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + body)
        yield


def test_a_wait_for_the_budget_ends_at_the_deadline(
    far: FarCluster, ledger: Ledger, prompt: str, expected: str
) -> None:
    """R41: bounded; the one who holds the budget, and makes progress, is not disturbed."""
    far.link.bytes_per_s = 160e3
    slow = Request(far, exact_prompt(far.model_dir, 900, seed=29))
    far.wait("it holds the budget", lambda: far.replica("p0")["buffer_bytes_used"] > 0)
    late = Request(far, exact_prompt(far.model_dir, 900, seed=30))
    took_s = late.told("p0", "buffer", "full", within_s=far.timeout_s + ANSWER_S)
    slow.good()
    left = far.recovered(prompt, expected)
    ledger.row(f"budget full beyond the deadline ({far.timeout_s:g} s)", late.answer, took_s, left)
