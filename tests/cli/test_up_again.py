"""`pdctl up` on a cluster that runs, or was left behind: doubles of engines, all else real."""

from __future__ import annotations

import os
import signal

import pytest
from cli.shell import TIMEOUT_S, Shell
from ports import free_port

from pdctl.runtime.machine import process

pytestmark = pytest.mark.engine

P1 = """
[[replicas]]
name = "p1"
engine = "mlx"
role = "prefill"
model = "{model}"
compute_dtype = "float32"
env = {{ DOUBLE = "{fault}" }}
"""


@pytest.fixture
def up(shell: Shell) -> Shell:
    """A running cluster of p0 and d0."""
    shell("up", shell.file, "-d")
    shell.record()
    return shell


def add(shell: Shell, fault: str = "") -> None:
    """p1, at the end of the file."""
    with shell.file.open("a") as file:
        file.write(P1.format(model=shell.model, fault=fault))


def pids(shell: Shell) -> dict[str, int]:
    found = shell.ps()
    return {
        r["name"]: r["pid"] for r in [*found["replicas"], {"name": "router", **found["router"]}]
    }


def test_up_again_changes_nothing_where_nothing_differs(up: Shell) -> None:
    """Exit 0 with the URL; no process is another one afterwards."""
    before = pids(up)
    out, err = up("up", up.file)
    assert out == f"{up.record().url}\n"
    assert f"{up.name} runs as its file says: nothing to change" in err
    assert pids(up) == before


def test_a_replica_is_added_and_removed_while_requests_run(up: Shell) -> None:
    """Nothing else restarts, a running request is answered, and down leaves nothing."""
    before = pids(up)
    plain = up.file.read_text()
    with up.held("p0>d0") as answer:
        add(up)
        _, err = up("up", up.file)
        assert "+ p1\n" in err
        assert "pair p1>d0 ready" in err
        assert {up.ask().headers["x-pdctl-path"] for _ in range(6)} >= {"p1>d0"}
        assert {name: pid for name, pid in pids(up).items() if name != "p1"} == before
        up.file.write_text(plain)
        _, err = up("up", up.file, "-d")
        assert "- p1\n" in err
        assert pids(up) == before
        assert process.marked(up.record().run, "p1") == []
        assert not answer.done()
    assert answer.result(TIMEOUT_S).status_code == 200
    assert up.ask(path="p1>d0").status_code == 400
    up("down", up.file)
    up.assert_down()


def test_a_changed_replica_restarts_alone(up: Shell) -> None:
    """It gets the new order, after its running request; the next crash starts it so too."""
    before = pids(up)
    up.edit('role = "decode"', 'role = "decode"\nengine_config = { prefill_step_size = 64 }')
    _, err = up("up", up.file)
    assert "~ d0: engine_config.prefill_step_size: none → 64 (restart)" in err
    after = pids(up)
    assert {n for n in before if before[n] != after[n]} == {"d0"}
    assert "64" in " ".join(_argv(after["d0"]))
    os.kill(after["d0"], signal.SIGKILL)
    up.until("it is back", lambda: up.replica("d0")["restarts"] == 2)
    up.until("it serves", lambda: up.ask().status_code == 200)
    assert "64" in " ".join(_argv(pids(up)["d0"]))


def _argv(pid: int) -> list[str]:
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read().split("\0")


def test_the_router_takes_a_policy_while_serving_and_an_address_by_a_restart(up: Shell) -> None:
    before = pids(up)
    up.edit("[router]", '[router]\npolicy = "round_robin"')
    _, err = up("up", up.file)
    assert "~ router: router.policy: least_loaded → round_robin (while it serves)" in err
    assert pids(up) == before
    port = free_port()
    up.edit(up.record().plan.router_bind, f"127.0.0.1:{port}")
    out, err = up("up", up.file)
    assert out == f"http://127.0.0.1:{port}\n"
    assert "(restart)" in err
    assert up.ask().status_code == 200
    assert {n for n in before if before[n] != pids(up)[n]} == {"router"}


def test_a_change_that_fails_is_undone(up: Shell) -> None:
    """Exit 5 with the cause and the log's last lines; what ran before runs, as it ran."""
    before = pids(up)
    plain = up.record()
    add(up, fault="exit")
    _, err = up("up", up.file, code=5)
    assert "p1 | double: cannot find the weights" in err
    assert "p1 did not come back: it exited with status 3; the cluster is as it was" in err
    assert pids(up) == before
    assert up.record() == plain
    assert process.marked(plain.run, "p1") == []
    assert up.ask().status_code == 200
    up.file.write_text(up.file.read_text().replace('DOUBLE = "exit"', 'DOUBLE = ""'))
    up("up", up.file)
    assert up.ask(path="p1>d0").status_code == 200


def test_a_changed_replica_that_fails_is_started_as_before(up: Shell) -> None:
    """And a removed one comes back: the file asked for both at once."""
    add(up)
    up("up", up.file)
    text = up.file.read_text()
    up.file.write_text(text[: text.index('[[replicas]]\nname = "p1"')])
    up.edit('role = "decode"', 'role = "decode"\nhttp_port = 1')
    up.edit("http_port = 1", f"http_port = {free_port()}")
    head, _, tail = up.file.read_text().partition('name = "d0"')
    up.file.write_text(f'{head}name = "d0"{tail.replace(chr(34) * 2, chr(34) + "exit" + chr(34))}')
    _, err = up("up", up.file, code=5)
    assert "the cluster is as it was" in err
    assert {r["state"] for r in up.ps()["replicas"]} == {"ready"}
    assert up.ask(path="p1>d0").status_code == 200


def test_a_replica_that_was_to_move_serves_again_where_the_change_fails(up: Shell) -> None:
    """d0 was to be reached at another port, and was closed for that; p0 failed before it."""
    up.edit('role = "decode"', f'role = "decode"\nhttp_port = {free_port()}')
    head, _, tail = up.file.read_text().partition('DOUBLE = ""')
    up.file.write_text(f'{head}DOUBLE = "exit"{tail}')
    before = pids(up)
    _, err = up("up", up.file, code=5)
    assert "p0 did not come back: it exited with status 3; the cluster is as it was" in err
    assert {r["state"] for r in up.ps()["replicas"]} == {"ready"}
    assert pids(up)["d0"] == before["d0"]
    assert up.ask().status_code == 200


def test_an_interrupted_change_is_undone(up: Shell) -> None:
    """Exit 130, and the cluster is as it was."""
    before = pids(up)
    add(up, fault="never_ready")
    with up.begin("up", up.file) as running:
        up.until("p1 starts", lambda: "p1" in pids(up))
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 130
    assert "the cluster is as it was" in err
    assert pids(up) == before


def test_what_a_running_cluster_cannot_take_over_is_refused(up: Shell) -> None:
    """Exit 2 with the hint to go down first; nothing was touched."""
    before = pids(up)
    up.edit("context_length = 256", "context_length = 128")
    _, err = up("up", up.file, code=2)
    assert "can't take over model.context_length: 256 → 128" in err
    assert f"`pdctl down {up.name}`, then `pdctl up` again" in err
    up.edit('role = "decode"', 'role = "decod"')
    up("up", up.file, code=2)
    assert pids(up) == before


def test_a_change_that_was_killed_is_finished_by_the_next(up: Shell) -> None:
    """U33: kill -9 on `up` in mid-change; the record says what was under way, and the next
    `up` of the file brings the cluster there."""
    gate = up.folder / "gate"
    add(up, fault="never_ready")
    with up.begin("up", up.file) as running:
        up.until("p1 starts", lambda: "p1" in up.record().unsettled and pids(up).get("p1"))
        running.kill()
        running.communicate(timeout=TIMEOUT_S)
    assert not gate.exists()
    up.edit('DOUBLE = "never_ready"', 'DOUBLE = ""')
    _, err = up("up", up.file)
    assert "~ p1: env.DOUBLE, not as it should be (restart)" in err
    assert up.record().unsettled == ()
    assert up.ask(path="p1>d0").status_code == 200


def test_what_has_failed_or_stopped_is_started_again(up: Shell) -> None:
    """The file is the same, but a crash loop has ended a replica."""
    for _ in range(12):
        found = up.replica("d0")
        if found["state"] == "failed":
            break
        if found["pid"]:
            os.kill(found["pid"], signal.SIGKILL)
        up.until("it goes on", lambda was=found: up.replica("d0") != was)
    up.until("it gives up", lambda: up.replica("d0")["state"] == "failed")
    _, err = up("up", up.file)
    assert "~ d0: not as it should be (restart)" in err
    assert up.ask().status_code == 200


def test_a_cluster_whose_host_was_rebooted_is_launched_anew(up: Shell) -> None:
    """Every process gone at once: what is left is cleared away, saying so, then launched."""
    for mark in process.marked(up.record().run):
        process.signal_group(mark, signal.SIGKILL)
    up.until("all is gone", lambda: not process.marked(up.record().run))
    _, err = up("up", up.file, "-d")
    assert "does not run any more: taking down what is left first" in err
    up.record()
    assert up.ask().status_code == 200
    up("down", up.file)
    up.assert_down()


def test_a_foreground_up_takes_down_what_another_has_added(shell: Shell) -> None:
    """Ctrl-C ends the cluster as it is by then, not as it was launched."""
    with shell.begin("up", shell.file) as running:
        assert running.stdout is not None
        running.stdout.readline()
        add(shell)
        shell("up", shell.file)
        assert "p1" in pids(shell)
        shell.record()
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 0, err
    shell.assert_down()
