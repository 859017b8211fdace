"""Peers that may not be served, and prompts for which there is no room: real engines refuse
them, and others do not notice."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from e2e.far import HOSTS, FarCluster
from e2e.faults import ANSWER_S, Ledger, Request
from e2e.prompts import exact_prompt
from e2e.way import HELD_PAGES, TICKETS, Ticket, Way

pytestmark = [pytest.mark.engine, pytest.mark.ssh]

GARBAGE = (b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 4096, secrets.token_bytes(4096))
SILENT_AT_EACH = 8


@pytest.mark.parametrize(("made", "words"), TICKETS)
def test_a_ticket_is_refused(way: Way, made: Ticket, words: str) -> None:
    way.ticket_refused(made, words)


def test_a_ticket_is_replayed(way: Way) -> None:
    way.replayed()


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
