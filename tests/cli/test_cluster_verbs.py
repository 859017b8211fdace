"""up, ps, logs and down as a user types them. The engines are doubles; all else is real, with
validation and its probes on a tiny checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

import msgspec
import psutil
import pytest
from cli.shell import PDCTL, TIMEOUT_S, Shell

from pdctl.runtime.machine import process
from pdctl.topology.model import Host

pytestmark = pytest.mark.engine


def test_up_ps_logs_down(shell: Shell) -> None:
    """The whole life of a detached cluster, by path and by name."""
    out, err = shell("up", shell.file, "--detach")
    record = shell.record()
    assert out == f"{record.url}\n"
    assert "pair p0>d0 ready" in err
    found: dict[str, Any] = json.loads(shell("ps", shell.file, "--json")[0])
    assert found["cluster"] == shell.name
    assert {r["name"]: r["state"] for r in found["replicas"]} == {"p0": "ready", "d0": "ready"}
    assert {r["compute_dtype"] for r in found["replicas"]} == {"float32"}
    assert found["pairs"][0]["state"] == found["router"]["state"] == "ready"
    table = shell("ps", shell.name)[0]
    assert "p0>d0" in table
    assert "float32" in table
    out, _ = shell("logs", shell.name, "p0", "router", "--tail", "1")
    assert [line.split(" | ")[0].strip() for line in out.splitlines()] == ["p0", "router"]
    assert "double: well" in shell("logs", shell.file, "--grep", "^double")[0]
    assert "no log of" in shell("logs", shell.file, "x9", code=2)[1]
    out, err = shell("down", shell.file)
    assert out.startswith(f"{shell.name} is down")
    assert "stopped router" in err
    shell.assert_down()
    assert "double: well" in shell("logs", shell.name)[0]
    assert shell("down", shell.file)[0] == f"{shell.name} is not running: nothing to stop\n"
    assert "is not running" in shell("ps", shell.file, code=1)[1]


def test_a_killed_replica_comes_back_and_is_canaried(shell: Shell) -> None:
    """R61: ps shows the restart, and the pair is ready for the new incarnation."""
    shell("up", shell.file, "-d")
    shell.record()

    def ps() -> dict[str, Any]:
        return dict(json.loads(shell("ps", shell.file, "--json")[0]))

    before = ps()["replicas"][1]
    os.kill(before["pid"], signal.SIGKILL)

    def recovered() -> bool:
        now = ps()
        replica, pair = now["replicas"][1], now["pairs"][0]
        return (replica["restarts"], replica["state"], pair["state"]) == (1, "ready", "ready")

    shell.until("the replica is back", recovered)
    shell("down", shell.name)
    shell.assert_down()


def test_a_killed_router_comes_back(shell: Shell) -> None:
    """U35: the agent restarts the router as it does replicas."""
    shell("up", shell.file, "-d")
    shell.record()
    router = json.loads(shell("ps", shell.file, "--json")[0])["router"]
    os.kill(router["pid"], signal.SIGKILL)

    def recovered() -> bool:
        now = json.loads(shell("ps", shell.file, "--json")[0])
        return bool(
            now["router"]["pid"] != router["pid"]
            and now["pairs"]
            and now["router"]["state"] == now["pairs"][0]["state"] == "ready"
        )

    shell.until("the router is back", recovered)
    shell("down", shell.name)
    shell.assert_down()


def test_two_launches_at_once(shell: Shell) -> None:
    """The second is told which command holds the lock; the first goes on."""
    shell.write(p0="never_ready")
    with shell.begin("up", shell.file, "-d") as first:
        shell.until("it starts replicas", shell.started)
        shell.record()
        for verb in ("up", "down"):
            _, err = shell(verb, shell.file, code=1)
            assert f"pdctl up {shell.file} -d" in err
            assert f"pid {first.pid}" in err
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 130
    shell.assert_down()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_up_rolls_back(shell: Shell, number: signal.Signals) -> None:
    """R58: exit 130 for each signal, also when it comes twice; nothing is left."""
    shell.write(p0="never_ready")
    with shell.begin("up", shell.file) as running:
        shell.until("it starts replicas", shell.started)
        shell.record()
        running.send_signal(number)
        running.send_signal(number)
        _, err = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 130, err
    assert f"interrupted by {number.name}" in err
    shell.assert_down()


def test_a_failed_up_shows_the_log_and_rolls_back(shell: Shell) -> None:
    """Exit 5, the last lines of the log, its path; logs stay."""
    shell.write(d0="exit")
    _, err = shell("up", shell.file, code=5)
    assert "d0 | double: cannot find the weights" in err
    assert 'error: replica "d0" failed: it exited with status 3' in err
    assert str(shell.state.log("d0")) in err
    shell.assert_down()
    assert shell.state.log("d0").exists()


def test_logs_that_lie_elsewhere_are_looked_for_after_down(shell: Shell) -> None:
    """Where their host is away, that is said, and what lies here is shown."""
    shell("up", shell.file, "-d")
    record = shell.record()
    shell("down", shell.name)
    hosts = {**record.topology.hosts, "gpu1": Host(name="gpu1", ssh="ssh://127.0.0.1:1")}
    ports = {**record.plan.agent_ports, "gpu1": 1}
    d0 = msgspec.structs.replace(record.plan.replica("d0"), host="gpu1")
    shell.state.write_ended(
        msgspec.structs.replace(
            record,
            topology=msgspec.structs.replace(record.topology, hosts=hosts),
            plan=msgspec.structs.replace(
                record.plan, replicas=(record.plan.replica("p0"), d0), agent_ports=ports
            ),
        )
    )
    out, err = shell("logs", shell.name)
    assert "p0          | double: well" in out
    assert "d0          |" not in out
    assert 'logs left out: host "gpu1"' in err


def test_an_invalid_topology_starts_nothing(shell: Shell) -> None:
    """R52: validation is the gate; no state is left either."""
    shell.file.write_text(shell.file.read_text().replace('role = "decode"', 'role = "decod"'))
    _, err = shell("up", shell.file, code=2)
    assert "decod" in err
    shell.file.write_text("")
    shell("up", shell.file, code=2)
    shell("up", shell.folder / "absent.toml", code=2)
    assert not shell.state.path.exists()


def test_the_foreground_shows_logs_until_ctrl_c(shell: Shell) -> None:
    """Ctrl-C is a down: exit 0 and nothing left; log lines come with their replica's name."""
    with shell.begin("up", shell.file) as running:
        assert running.stdout is not None
        url = running.stdout.readline().strip()
        record = shell.record()
        assert url == record.url
        with shell.state.log("p0").open("a") as log:
            log.write("a line of its own\n")
        line = next(line for line in running.stdout if "a line of its own" in line)
        assert line.split(" | ")[0].strip() == "p0"
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 0, err
    shell.assert_down()


def test_the_foreground_stops_everything_when_nobody_reads_it(shell: Shell) -> None:
    """`pdctl up 2>&1 | head`: no traceback, and no cluster that nobody watches."""
    read, write = os.pipe()
    with subprocess.Popen(
        [PDCTL, "up", shell.file], env=shell.env, stdout=write, stderr=subprocess.STDOUT
    ) as running:
        os.close(write)
        with os.fdopen(read) as lines:
            assert any("Ctrl-C stops it" in line for line in lines)
        shell.record()
        with shell.state.log("p0").open("a") as log:
            log.write("a line of its own\n")
        assert running.wait(TIMEOUT_S) == 1
    shell.assert_down()


def test_the_foreground_ends_when_it_is_taken_down_elsewhere(shell: Shell) -> None:
    """`pdctl down` in another terminal ends a foreground `up`, without an error."""
    with shell.begin("up", shell.file) as running:
        assert running.stdout is not None
        running.stdout.readline()
        shell.record()
        shell("down", shell.name)
        _, err = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 0, err
    shell.assert_down()


def test_the_foreground_stops_everything_when_its_agent_dies(shell: Shell) -> None:
    """Exit 1 with the agent's log; replicas do not outlive a foreground `up`."""
    with shell.begin("up", shell.file) as running:
        assert running.stdout is not None
        running.stdout.readline()
        os.kill(shell.record().agents["local"].mark.pid, signal.SIGKILL)
        _, err = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 1
    assert "the agent ended by itself" in err
    shell.assert_down()


def test_ps_and_down_without_an_agent(shell: Shell) -> None:
    """U26: after kill -9 of the agent with its watchdog, ps fails, shows what its journal knows
    and says what to do; down leaves nothing."""
    shell("up", shell.file, "-d")
    os.killpg(shell.record().agents["local"].mark.pid, signal.SIGKILL)
    assert "unsupervised" in shell("ps", shell.name, code=1)[0]
    out, err = shell("ps", shell.name, "--json", code=1)
    found = json.loads(out)
    assert "error: the agent" in err
    assert "does not answer" in err
    assert f"hint: {found['hint']}" in err
    assert found["phase"] == "agent lost"
    assert {r["state"] for r in found["replicas"]} == {"unsupervised"}
    shell("down", shell.name)
    shell.assert_down()


def test_a_killed_agent_is_back_by_itself(shell: Shell) -> None:
    """U35: its watchdog starts another, which takes replicas and router over as they run."""
    shell("up", shell.file, "-d")
    watchdog = shell.record().agents["local"].mark
    before = shell.ps()
    (agent,) = psutil.Process(watchdog.pid).children()
    agent.kill()
    agent.wait(10)
    assert shell.ask().status_code == 200
    shell.until("a new agent answers", lambda: shell.succeeds("ps", shell.name))
    shell.until("all is ready", lambda: all(r["state"] == "ready" for r in shell.ps()["replicas"]))
    after = shell.ps()
    assert [r["pid"] for r in after["replicas"]] == [r["pid"] for r in before["replicas"]]
    assert after["router"]["pid"] == before["router"]["pid"]
    assert shell.ask().status_code == 200
    shell("down", shell.name)
    shell.assert_down()


def test_down_ends_a_replica_that_ignores_sigterm(shell: Shell) -> None:
    """R23: bounded; SIGKILL follows the grace."""
    shell.write(p0="stubborn", d0="forks")
    shell("up", shell.file, "-d")
    shell.record()
    shell("down", shell.name)
    shell.assert_down()


def test_a_launch_that_was_killed_is_taken_down(shell: Shell) -> None:
    """U33: kill -9 on `up` itself; the next `up` says so, clears it away and launches."""
    shell.write(p0="never_ready")
    with shell.begin("up", shell.file, "-d") as running:
        shell.until("it starts replicas", shell.started)
        shell.record()
        running.kill()
        running.communicate(timeout=TIMEOUT_S)
    left = shell.record()
    shell.write()
    _, err = shell("up", shell.file, "-d")
    assert "was left half launched or half stopped: taking down what is left first" in err
    assert process.marked(left.run) == []
    shell.record()
    shell("down", shell.file)
    shell.assert_down()
