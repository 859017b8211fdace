"""The launch itself disturbed, on three machines: nothing stays behind, and the next one works."""

from __future__ import annotations

import os
import pty
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from e2e.cluster import PDCTL, UP_TIMEOUT_S
from e2e.far import D_HOST, P_HOST, FarCluster, gone_wrong
from e2e.faults import Ledger, Request
from e2e.prompts import exact_prompt
from sshd import Machines, machines

pytestmark = [pytest.mark.engine, pytest.mark.ssh]

ROLLED_BACK_S = 20.0


@pytest.fixture(scope="module")
def found() -> Iterator[Machines]:
    with machines(P_HOST, D_HOST) as found:
        yield found


@pytest.fixture
def cold(found: Machines, checkpoints: dict[str, Path], tmp_path: Path) -> Iterator[FarCluster]:
    """Not launched yet; nothing of it may be left at the end."""
    cluster = FarCluster(tmp_path, checkpoints["llama"], found)
    with cluster.link:
        yield cluster
    cluster.http.close()
    assert list(cluster.leftovers()) == []


def start(cluster: FarCluster, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(PDCTL), *map(str, words)],
        env=cluster.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def engines(cluster: FarCluster) -> list[psutil.Process]:
    """Of a launch in progress: on whatever machine they run."""
    cluster.run = cluster.run or cluster.record().run
    return [process for kind, process in cluster.processes() if kind == "engine"]


def launched(cluster: FarCluster) -> bool:
    return (cluster.state / "pdctl" / cluster.name / "cluster.json").exists()


@pytest.mark.parametrize("detach", [(), ("--detach",)], ids=["foreground", "detached"])
def test_the_terminal_is_closed_in_mid_launch(
    cold: FarCluster, ledger: Ledger, detach: tuple[str, ...]
) -> None:
    """SIGHUP from a terminal that is gone, once engines run on other machines: all of it is
    rolled back."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(PDCTL, [str(PDCTL), "up", str(cold.topology), *detach], cold.env)
    cold.wait("a record", lambda: drained(terminal) and launched(cold))
    cold.wait("an engine", lambda: drained(terminal) and len(engines(cold)) > 0)
    record = cold.record()
    os.close(terminal)
    closed_s = time.monotonic()
    _, status = os.waitpid(pid, 0)
    took_s = time.monotonic() - closed_s
    assert took_s < ROLLED_BACK_S
    assert os.waitstatus_to_exitcode(status) == 130
    left = [*cold.leftovers(), *gone_wrong(record)]
    assert left == []
    assert not launched(cold)
    shown = "up -d" if detach else "up"
    ledger.row(f"terminal closed in mid-`{shown}`", "exit 130, rolled back", took_s, len(left))


def drained(terminal: int) -> bool:
    """Reads what has been shown, so that nobody waits for us."""
    os.set_blocking(terminal, False)
    try:
        while os.read(terminal, 65536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        raise AssertionError("the command has ended") from None
    return True


def test_two_launches_at_once_and_an_end_with_requests_running(
    cold: FarCluster, ledger: Ledger
) -> None:
    """The second one is told who holds the lock, and spoils nothing. `down` ends the requests
    that run, and everything else."""
    first = start(cold, "up", cold.topology, "--detach")
    cold.wait("a record", lambda: launched(cold))
    began_s = time.monotonic()
    second = start(cold, "up", cold.topology, "--detach")
    _, told = second.communicate(timeout=60)
    took_s = time.monotonic() - began_s
    assert second.returncode == 1, told
    assert str(first.pid) in told, told
    _, said = first.communicate(timeout=UP_TIMEOUT_S)
    assert first.returncode == 0, said
    cold.run = cold.record().run
    cold.at_rest = cold.census()
    error = next(line for line in told.splitlines() if "error" in line)
    ledger.row("second `up` at once", f"exit {second.returncode}, {error}", took_s, 0)
    end_with_requests(cold, ledger)


def end_with_requests(cold: FarCluster, ledger: Ledger) -> None:
    record = cold.record()
    prompt = exact_prompt(cold.model_dir, 600, seed=31)
    cold.link.bytes_per_s = 60e3
    slow = Request(cold, prompt)
    cold.wait("a transfer", lambda: cold.replica("p0")["handoffs_active"] == 1)
    streams = [Request(cold, prompt, path="o0", max_tokens=1400) for _ in range(2)]
    assert all(stream.begun.wait(20) for stream in streams)
    began_s = time.monotonic()
    cold.pdctl("down", cold.topology)
    took_s = time.monotonic() - began_s
    assert slow.result(5).status == 503
    for request in (slow, *streams):
        request.result(5)
        assert request.error is not None
        assert request.error["code"] == "router_stopped"
        assert not request.complete
    left = [*cold.leftovers(), *gone_wrong(record)]
    assert left == []
    answers = " · ".join(sorted({slow.answer, streams[0].answer}))
    ledger.row("`down` while requests run", answers, took_s, len(left))
