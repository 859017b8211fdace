"""A host's SSH connection cut, its sshd away, and the whole host rebooted."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import pytest
from e2e.far import D_HOST, P_HOST, FarCluster
from e2e.faults import ANSWER_S, Ledger, Request
from e2e.way import HELD_PAGES

pytestmark = [pytest.mark.engine, pytest.mark.ssh]


def processes(far: FarCluster) -> dict[str, tuple[int, int]]:
    """Replica → (pid, restarts)."""
    return {r["name"]: (r["pid"], r["restarts"]) for r in far.status()["replicas"]}


@pytest.mark.parametrize(
    ("host", "leg", "replica"), [(P_HOST, "prefill", "p0"), (D_HOST, "decode", "d0")]
)
def test_a_connection_is_cut_in_a_transfer(
    far: FarCluster,
    ledger: Ledger,
    prompt: str,
    expected: str,
    host: str,
    leg: str,
    replica: str,
) -> None:
    """The forward goes with it: that leg is told at once; others are not disturbed, and traffic
    comes back with the connection, to the same process."""
    before = processes(far)
    far.link.hold(HELD_PAGES)
    request = Request(far, prompt)
    other = Request(far, prompt, path="o0", max_tokens=300)
    assert far.link.held.wait(20)
    assert other.begun.wait(20)
    cut_s = time.monotonic()
    far.machines[host].cut()
    took_s = request.told(leg, replica, since_s=cut_s)
    other.good()
    left = far.recovered(prompt, expected)
    assert processes(far) == before
    ledger.row(f"SSH to {leg}'s host cut in a transfer", request.answer, took_s, left)


def test_a_connection_is_cut_in_an_answer(
    far: FarCluster, ledger: Ledger, prompt: str, expected: str
) -> None:
    """R63: the stream ends with an error event; the engine stops computing for nobody."""
    before = processes(far)
    request = Request(far, prompt, max_tokens=1200)
    assert request.begun.wait(20)
    cut_s = time.monotonic()
    far.machines[D_HOST].cut()
    took_s = request.told("decode", "d0", since_s=cut_s)
    left = far.recovered(prompt, expected)
    assert processes(far) == before
    ledger.row("SSH to decode's host cut in an answer", request.answer, took_s, left)


def test_a_host_is_away_for_a_while(
    far: FarCluster, ledger: Ledger, prompt: str, expected: str
) -> None:
    """U27: its paths are closed at once and say why, what is free of it answers instead, and
    it is back after reconnection: nothing there was restarted."""
    before = processes(far)
    stopped_s = time.monotonic()
    far.machines[D_HOST].stop()
    far.wait("closed", lambda: far.pair()["state"] == "waiting", timeout_s=ANSWER_S)
    pinned = Request(far, prompt)
    took_s = pinned.told("decode", "d0", D_HOST, since_s=stopped_s)
    assert pinned.status == 503
    free = Request(far, prompt, path=None, max_tokens=8).good(expected)
    assert free.path == "o0"
    assert far.replica("d0")["state"] == "unreachable"
    far.machines[D_HOST].start()
    started_s = time.monotonic()
    far.wait("every pair ready", far.ready)
    back_s = time.monotonic() - started_s
    left = far.recovered(prompt, expected)
    assert processes(far) == before
    ledger.row("sshd of decode's host away", pinned.answer, took_s, left)
    ledger.row("… and there again: ready", free.answer, back_s, left)


def test_every_connection_of_the_keeper_is_away(
    far: FarCluster, ledger: Ledger, prompt: str, expected: str
) -> None:
    """Losing the way to all other hosts ends no process on them."""
    before = processes(far)
    request = Request(far, prompt, max_tokens=1200)
    assert request.begun.wait(20)
    stopped_s = time.monotonic()
    for host in (P_HOST, D_HOST):
        far.machines[host].stop()
    took_s = request.told("d0", since_s=stopped_s)
    free = Request(far, prompt, path=None, max_tokens=8).good(expected)
    assert free.path == "o0"
    assert all(psutil.pid_exists(pid) for pid, _ in before.values())
    left = far.recovered(prompt, expected)
    assert processes(far) == before
    ledger.row("sshd of both hosts away in an answer", request.answer, took_s, left)


def test_a_host_is_rebooted(far: FarCluster, ledger: Ledger, prompt: str, expected: str) -> None:
    """U35: every process there is gone, its agent and watchdog too, and its sockets: the keeper
    starts the agent again, which starts its replica."""
    before = processes(far)
    request = Request(far, prompt, max_tokens=1200)
    assert request.begun.wait(20)
    struck_s = time.monotonic()
    reboot(far, D_HOST, "d0")
    took_s = request.told("decode", "d0", since_s=struck_s)
    pinned = Request(far, prompt)
    pinned.told("decode", "d0")
    far.machines[D_HOST].start()
    started_s = time.monotonic()
    far.wait("every pair ready", far.ready)
    back_s = time.monotonic() - started_s
    left = far.recovered(prompt, expected)
    after = processes(far)
    assert after["p0"] == before["p0"]
    assert after["d0"][0] != before["d0"][0]
    ledger.row("decode's host rebooted", request.answer, took_s, left)
    ledger.row("… and there again: ready", "200, whole", back_s, left)


def reboot(far: FarCluster, host: str, replica: str) -> None:
    """Ends sshd, and every process that the cluster has on that machine."""
    going = [
        far.agent(host, "watchdog"),
        far.agent(host),
        psutil.Process(far.replica(replica)["pid"]),
    ]
    far.machines[host].stop()
    for process in going:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    Path(far.record().socket_dir, f"{host}.sock").unlink(missing_ok=True)
