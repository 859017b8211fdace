"""`pdctl restart` as a user types it, on doubles of engines behind a real agent and router."""

from __future__ import annotations

import signal

import pytest
from cli.shell import TIMEOUT_S, Shell

pytestmark = pytest.mark.engine


@pytest.fixture
def up(shell: Shell) -> Shell:
    """A running cluster whose d0 can be made to end at its next start."""
    shell.write(d0=f"exit if {shell.folder}/broken")
    shell("up", shell.file, "-d")
    shell.record()
    return shell


def test_restart_drains_stops_starts_and_rejoins(up: Shell) -> None:
    """The running request is answered whole; then another process has passed its canary."""
    before = up.replica("p0")
    with up.held() as answer, up.begin("restart", up.file, "p0") as restarting:
        up.until("it drains", lambda: up.replica("p0")["state"] == "draining")
        _, err = up("down", up.name, code=1)
        assert f'is being changed by "pdctl restart {up.file} p0"' in err
        assert up.ask().status_code == 503
        for gate in up.folder.glob("gate-*"):
            gate.unlink()
        out, err = restarting.communicate(timeout=TIMEOUT_S)
        assert answer.result(TIMEOUT_S).status_code == 200
    assert restarting.returncode == 0, err
    assert out == "p0 is back\n"
    steps = ("replica p0 draining", "waiting for 1 request", "replica p0 stopping")
    steps += ("replica p0 starting", "replica p0 ready", "pair p0>d0 ready")
    assert sorted(steps, key=err.index) == list(steps)
    after = up.replica("p0")
    assert (after["state"], after["restarts"]) == ("ready", 1)
    assert after["pid"] != before["pid"]
    assert up.ask(path="p0>d0").status_code == 200
    up("down", up.name)
    up.assert_down()


def test_restart_of_a_busy_replica(up: Shell) -> None:
    """Exit 1 at its timeout, or 130, leaves it serving as before; `--now` cuts the request."""
    with up.held() as answer:
        _, err = up("restart", up.name, "d0", "--timeout", "0.5", code=1)
        assert "d0: 1 request still runs after 0.5 s; it was not restarted" in err
        assert up.replica("d0")["state"] == "ready"
        with up.begin("restart", up.name, "d0") as restarting:
            up.until("it drains", lambda: up.replica("d0")["state"] == "draining")
            restarting.send_signal(signal.SIGINT)
            restarting.communicate(timeout=TIMEOUT_S)
        assert restarting.returncode == 130
        assert up.replica("d0")["state"] == "ready"
        assert up.replica("d0")["restarts"] == 0
        assert not answer.done()
        up("restart", up.name, "d0", "--now")
        assert answer.result(TIMEOUT_S).status_code in (502, 503)
    assert up.replica("d0")["restarts"] == 1


def test_a_replica_that_does_not_come_back(up: Shell) -> None:
    """U35: the crash loop ends in "failed" with its cause in ps; exit 1 with the log's last
    lines; mended, `restart` brings it back."""
    (up.folder / "broken").touch()
    _, err = up("restart", up.name, "d0", code=1)
    assert "d0 | double: cannot find the weights" in err
    assert "d0 did not come back: it exited with status 3" in err
    assert str(up.state.log("d0")) in err
    failed = up.replica("d0")
    assert (failed["state"], failed["cause"]) == ("failed", "it exited with status 3")
    assert "d0: it exited with status 3" in up("ps", up.name)[0]
    assert up.ps()["pairs"][0]["state"] == "waiting"
    assert up.ask().status_code == 503
    (up.folder / "broken").unlink()
    up("restart", up.name, "d0")
    assert up.ask().status_code == 200


def test_the_router_restarts_too(up: Shell) -> None:
    """Running requests are answered, new ones refused meanwhile; then all paths are ready."""
    before = up.ps()["router"]
    with up.held() as answer, up.begin("restart", up.name, "router") as restarting:
        up.until("it drains", lambda: up.ps()["router"]["state"] == "draining")
        refused = up.ask()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "router_draining")
        for gate in up.folder.glob("gate-*"):
            gate.unlink()
        _, err = restarting.communicate(timeout=TIMEOUT_S)
        assert answer.result(TIMEOUT_S).status_code == 200
    assert restarting.returncode == 0, err
    after = up.ps()
    assert after["router"]["pid"] != before["pid"]
    assert after["router"]["state"] == after["pairs"][0]["state"] == "ready"
    assert up.ask().status_code == 200


def test_a_drained_replica_rejoins_by_restart(up: Shell) -> None:
    """The mark goes with the old process; unknown names are refused with the known ones."""
    up("drain", up.name, "p0")
    up("restart", up.name, "p0")
    assert up.replica("p0")["state"] == "ready"
    _, err = up("restart", up.name, "x", code=2)
    assert "it has p0, d0, router" in err


def test_restart_says_who_changes_the_cluster(up: Shell) -> None:
    """Exit 1 while another command holds the lock, naming its command line and pid."""
    with up.held(), up.begin("restart", up.name, "p0") as first:
        up.until("it drains", lambda: up.replica("p0")["state"] == "draining")
        _, err = up("restart", up.name, "d0", code=1)
        assert f'"pdctl restart {up.name} p0" (pid {first.pid}' in err
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 130
