"""`pdctl drain` as a user types it, on doubles of engines behind a real agent and router."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cli.shell import TIMEOUT_S, Shell

pytestmark = pytest.mark.engine


@pytest.fixture
def two(shell: Shell) -> Shell:
    """A running cluster with two prefill replicas."""
    shell.write({"p0": "prefill", "p1": "prefill", "d0": "decode"})
    shell("up", shell.file, "-d")
    shell.record()
    return shell


def test_drain_waits_for_running_requests_and_takes_no_new_ones(two: Shell) -> None:
    """The running request is answered whole, new ones go through what stays, ps shows it, and
    `--undo` opens it again."""
    with two.held("p0>d0") as answer, two.begin("drain", two.name, "p0") as draining:
        two.until("it drains", lambda: two.replica("p0")["state"] == "draining")
        assert two.replica("p0")["routed_active"] == 1
        assert "draining" in two("ps", two.name)[0]
        assert {two.ask().headers["x-pdctl-path"] for _ in range(4)} == {"p1>d0"}
        pinned = two.ask(path="p0>d0")
        assert pinned.status_code == 503
        assert "it is draining" in pinned.text
        assert draining.poll() is None
        for gate in two.folder.glob("gate-*"):
            gate.unlink()
        out, err = draining.communicate(timeout=TIMEOUT_S)
        assert answer.result(TIMEOUT_S).status_code == 200
    assert draining.returncode == 0, err
    assert out == "p0 is drained: nothing runs on it\n"
    assert "this closes p0>d0; p1>d0 stays" in err
    assert "waiting for 1 request on p0" in err
    assert two("drain", two.file, "p0")[0] == "p0 is drained already: nothing runs on it\n"
    assert two("drain", two.name, "p0", "--undo")[0] == "p0 takes requests again\n"
    assert two("drain", two.name, "p0", "--undo")[0] == "p0 was not draining\n"
    two.until("it is open", lambda: two.ask(path="p0>d0").status_code == 200)
    two("down", two.name)
    two.assert_down()


def test_drain_ends_at_its_timeout_and_by_ctrl_c(two: Shell) -> None:
    """Exit 1 and 130; the replica stays draining either way, and both say so."""
    with two.held("p1>d0"):
        _, err = two("drain", two.name, "d0", "--timeout", "0.5", code=1)
        assert "d0: 1 request still runs after 0.5 s; d0 stays draining" in err
        assert "this closes p0>d0, p1>d0; no path stays" in err
        assert "--undo" in err
        assert two.ask().status_code == 503
        two("drain", two.name, "d0", "--undo")
        with two.begin("drain", two.name, "p1") as draining:
            two.until("it drains", lambda: two.replica("p1")["state"] == "draining")
            draining.send_signal(signal.SIGINT)
            _, err = draining.communicate(timeout=TIMEOUT_S)
        assert draining.returncode == 130
        assert "interrupted by SIGINT; p1 stays draining" in err
    assert two.replica("p1")["state"] == "draining"


def test_a_drained_replica_that_crashes_stays_drained(two: Shell) -> None:
    """R61: its next incarnation takes no traffic either, until that is undone."""
    two("drain", two.name, "p0")
    os.kill(two.replica("p0")["pid"], signal.SIGKILL)
    two.until("it is back", lambda: two.replica("p0")["restarts"] == 1)
    two.until("it drains", lambda: two.replica("p0")["state"] == "draining")
    assert two.ask(path="p0>d0").status_code == 503
    two("drain", two.name, "p0", "--undo")
    two.until("its canary passed", lambda: two.ask(path="p0>d0").status_code == 200)


def test_drain_of_what_is_not_there(two: Shell, tmp_path: Path) -> None:
    """Exit 2 for an unknown replica, naming the known ones; exit 1 where nothing runs."""
    _, err = two("drain", two.name, "p7", code=2)
    assert f'cluster "{two.name}" has no replica "p7"' in err
    assert "it has p0, p1, d0" in err
    two("drain", two.name, "router", code=2)
    two("down", two.name)
    assert "is not running" in two("drain", two.file, "p0", code=1)[1]
