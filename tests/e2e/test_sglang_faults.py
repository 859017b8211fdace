"""SGLang as prefill and as decode, another engine opposite: killed, cut off, frozen, given garbage
and forged tickets. What the client is told, when, and that nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
from e2e.faults import ANSWER_S, Ledger, Request
from e2e.mixed import Mixed, runs
from e2e.test_faults_strangers import GARBAGE, closes
from e2e.test_soak import CLEAR_GAP, answer_alone
from e2e.way import EDITS, TICKETS, Ticket, Way
from engines.sglang_replicas import needs_sglang
from engines.vllm_replicas import needs_vllm
from tiny import digits

pytestmark = [pytest.mark.engine, needs_sglang, needs_vllm]

PATHS = ("sp>md", "vp>sd")
BACK_S = 150.0
"""SGLang starts in half a minute on an idle machine."""
ENDED_S = 10.0
"""Where the agent does not tell, SGLang's server does, 6 s after its scheduler ended."""
LONG: dict[str, object] = {"max_tokens": 1200, "ignore_eos": True}


@pytest.fixture(scope="module")
def known(three: Mixed) -> tuple[str, str]:
    """A prompt of ten pages, and what MLX alone makes of it, without a near-tie."""
    for seed in range(40, 60):
        prompt = digits(600, seed)
        text, gap = answer_alone(three, prompt, "md", tokens=8)
        if gap >= CLEAR_GAP:
            return prompt, text
    raise AssertionError("no prompt has a clear answer")


@pytest.fixture
def ways(three: Mixed, ledger: Ledger, known: tuple[str, str]) -> Iterator[dict[str, Way]]:
    three.settle(BACK_S)
    yield {
        path: Way(three, three.links[path.partition(">")[0]], path, *known, ledger, path)
        for path in PATHS
    }
    three.settle(BACK_S)


@pytest.fixture(params=PATHS)
def way(ways: dict[str, Way], request: pytest.FixtureRequest) -> Way:
    return ways[request.param]


@pytest.mark.parametrize("fault", EDITS)
def test_frames_to_the_receiver_are_wrong(way: Way, fault: str) -> None:
    """U29, R28: whatever is not exactly what was promised ends the handoff, and commits nothing."""
    way.broken(fault)


def test_frames_to_the_sender_are_wrong(way: Way) -> None:
    way.grant_broken()


def test_the_link_is_cut(way: Way) -> None:
    """U10: both ends are freed at once."""
    way.cut()


def test_the_link_freezes(way: Way) -> None:
    """U6: 5 s of silence end it at both ends, and the next request does not wait."""
    way.frozen()


@pytest.mark.parametrize(("made", "words"), TICKETS)
def test_a_ticket_is_refused(ways: dict[str, Way], made: Ticket, words: str) -> None:
    ways["sp>md"].ticket_refused(made, words)


def test_a_ticket_is_replayed(ways: dict[str, Way]) -> None:
    ways["sp>md"].replayed()


def test_strangers_talk_garbage_at_every_port(three: Mixed, ways: dict[str, Way]) -> None:
    """SGLang's HTTP and the data port close; the same processes serve on."""
    pids = [replica["pid"] for replica in three.status()["replicas"]]
    plans = [three.record().plan.replica(name) for name in ("sp", "sd")]
    ports = [*(plan.http_port for plan in plans), three.links["sp"].target[1]]
    took_s = 0.0
    for port in ports:
        for noise in GARBAGE:
            began_s = time.monotonic()
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                with suppress(OSError):  # it may be shown the door before the end
                    connection.sendall(noise)
                    connection.shutdown(socket.SHUT_WR)
                assert closes(connection, ANSWER_S), (port, noise[:20])
            took_s = max(took_s, time.monotonic() - began_s)
    for way in ways.values():
        left = way.recovered()
    ways["sp>md"].row(f"garbage at each of {len(ports)} ports", "closed", took_s, left)
    assert [replica["pid"] for replica in three.status()["replicas"]] == pids


def test_the_router_is_killed(three: Mixed, ways: dict[str, Way]) -> None:
    """U14, U34: in a transfer out of SGLang and in an answer of its own; its clients lose their
    connections, SGLang notices by itself, and the same processes serve on."""
    pids = [replica["pid"] for replica in three.status()["replicas"]]
    sending, receiving = ways["sp>md"], ways["vp>sd"]
    answering = Request(three, receiving.prompt, path="vp>sd", **LONG)
    assert answering.begun.wait(30)
    router = int(three.ps()["router"]["pid"])
    held = sending.held()
    killed_s = time.monotonic()
    os.kill(router, signal.SIGKILL)
    for way, request, moment in (
        (sending, held, "during a transfer"),
        (receiving, answering, "in an answer"),
    ):
        took_s = request.told("connection", since_s=killed_s)
        way.row(f"router killed {moment}", request.answer, took_s, way.recovered())
    assert [replica["pid"] for replica in three.status()["replicas"]] == pids


def test_the_agent_is_killed(three: Mixed, ways: dict[str, Way]) -> None:
    """R61: no request notices; its watchdog starts it again, and it takes its replicas over."""
    pids = [replica["pid"] for replica in three.status()["replicas"]]
    watchdog = psutil.Process(three.record().agents["local"].mark.pid)
    (agent,) = watchdog.children()
    requests = {path: way.held(8) for path, way in ways.items()}
    agent.kill()
    for path, way in ways.items():
        way.link.release()
        requests[path].good(way.expected)
    three.wait("a new agent", lambda: any(p.pid != agent.pid for p in watchdog.children()))
    for path, way in ways.items():
        fault = "agent killed during a transfer"
        way.row(fault, requests[path].answer, None, way.recovered())
    assert [replica["pid"] for replica in three.status()["replicas"]] == pids


def test_replicas_are_killed(three: Mixed, ways: dict[str, Way]) -> None:
    """U10, U14, U26, U35, R61: before, during and after a transfer, on either side; nothing
    hangs, other paths go on, and each pair is in rotation again after its canary."""
    families = {name: three.processes(name) for name in ("sp", "sd")}
    kill_prefill(three, ways["sp>md"])
    kill_decode(three, ways["vp>sd"])
    three.mend()
    three.wait("every pair ready again", three.ready, BACK_S)
    for name, processes in families.items():
        assert len(processes) >= 3
        assert [process for process in processes if runs(process)] == []
        assert three.replica(name)["restarts"] == 1
    for way in ways.values():
        assert way.recovered() == 0


def kill_prefill(three: Mixed, way: Way) -> None:
    """The process that owns its KV memory."""
    after = Request(three, way.prompt, path=way.path, **LONG)
    assert after.begun.wait(30)
    during = way.held()
    killed_s = time.monotonic()
    three.kill_worker("sp")
    way.link.release()
    # whichever is known first: that sp's server ended with it, or that md lost its connection
    took_s = during.told('replica "', since_s=killed_s, within_s=ENDED_S)
    assert during.error is not None
    assert during.error["code"] in ("replica_lost", "replica_down", "peer_lost")
    way.row("prefill's scheduler killed during a transfer", during.answer, took_s, 0)
    three.wait("sp is gone", lambda: three.replica("sp")["state"] != "ready", 30)
    before = way.ask()
    took_s = before.told("sp")
    way.row("prefill's scheduler killed before a transfer", before.answer, took_s, 0)
    Request(three, way.prompt, path="vp>sd", max_tokens=8).good(way.expected)
    after.good()
    way.row("prefill's scheduler killed after a transfer", after.answer, None, 0)


def kill_decode(three: Mixed, way: Way) -> None:
    """All of the replica, at once."""
    after = Request(three, way.prompt, path=way.path, **LONG)
    assert after.begun.wait(30)
    during = way.held()
    killed_s = time.monotonic()
    three.kill("sd")
    way.link.release()
    took_s = during.told('decode replica "sd"', since_s=killed_s)
    way.row("decode killed during a transfer", during.answer, took_s, 0)
    took_s = after.told('decode replica "sd"', since_s=killed_s)
    way.row("decode killed after a transfer", after.answer, took_s, 0)
    before = way.ask()
    took_s = before.told("sd")
    way.row("decode killed before a transfer", before.answer, took_s, 0)
    Request(three, way.prompt, path="vp>md", max_tokens=8).good(way.expected)
