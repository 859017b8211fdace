"""Launch and rollback with an agent, a router and doubles of engines, all as real processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from runtime.clusters import sweep, written

from pdctl.errors import InterruptedLaunch, LaunchError
from pdctl.runtime.cluster.state import ClusterRecord, StateDir
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.launch.events import LaunchEvent, Stage
from pdctl.runtime.launch.launching import launch
from pdctl.runtime.launch.teardown import take_down
from pdctl.runtime.machine import process

pytestmark = pytest.mark.anyio


@contextmanager
def prepared(folder: Path, **options: Any) -> Iterator[tuple[StateDir, ClusterRecord]]:
    with written(folder, **options) as (state, record):
        try:
            yield state, record
        finally:
            sweep(record)


def assert_nothing_left(state: StateDir, record: ClusterRecord) -> None:
    """No process, port, socket, key or record; logs and what was measured only."""
    assert process.marked(record.run) == []
    listening = {one.port for one in LocalHost().survey.listeners()}
    assert not listening & record.plan.ports("local")
    assert not os.path.exists(record.socket_dir)
    assert {p.name for p in state.path.iterdir()} <= {"logs", "costs.json"}
    assert all(p.suffix == ".log" for p in state.logs.iterdir())


PATHS = (Stage.PAIR, Stage.PATH)


async def test_a_launch_ends_with_every_path_canaried(tmp_path: Path) -> None:
    """Agent, replicas, router, canaries, in that order; then down leaves logs only."""
    events: list[LaunchEvent] = []
    roles = {"p0": "prefill", "d0": "decode", "o0": "both"}
    with prepared(tmp_path, roles=roles) as (state, record):
        running = await launch(state, record, events.append, wait_timeout_s=60)
        assert running.phase == "running"
        assert running.url == f"http://{record.plan.router_bind}"
        assert state.read() == running
        stages = [Stage.PAIR if e.stage in PATHS else e.stage for e in events if e.state == "ready"]
        assert stages == sorted(stages, key=list(Stage).index)
        paths = {e.subject for e in events if e.stage in PATHS and e.state == "ready"}
        assert paths == {"p0>d0", "o0"}
        stopped: list[LaunchEvent] = []
        assert await take_down(state, running, stopped.append) == ()
        assert [e.subject for e in stopped][:1] + [e.subject for e in stopped][-1:] == [
            "router",
            "agent",
        ]
        assert_nothing_left(state, record)


@pytest.mark.parametrize(
    ("faults", "sentence"),
    [
        ({"d0": "exit"}, 'replica "d0" failed: it exited with status 3'),
        pytest.param(
            {"d0": "wrong_theta", "p0": "forks"},
            'replica "d0" failed: positions.rope_theta',
            marks=pytest.mark.engine,
        ),
        ({"p0": "no time"}, 'not ready within 0.001 s: the agent of host "local" does not answer'),
        pytest.param(
            {"p0": "never_ready"},
            'not ready within 3 s: replica "p0" is starting',
            marks=pytest.mark.engine,
        ),
    ],
    ids=["exits at start", "loaded something else", "no time at all", "never ready"],
)
async def test_a_failed_launch_leaves_nothing(
    tmp_path: Path, faults: dict[str, str], sentence: str
) -> None:
    """R58, U33: whatever fails is named, and everything that was started is stopped."""
    timeout_s = {"never_ready": 3, "no time": 0.001}.get(faults.get("p0", ""), 60)
    events: list[LaunchEvent] = []
    with prepared(tmp_path, faults=faults) as (state, record):
        with pytest.raises(LaunchError) as caught:
            await launch(state, record, events.append, wait_timeout_s=timeout_s)
        assert caught.value.message.startswith(sentence)
        assert caught.value.exit_code == 5
        assert caught.value.hint is not None
        assert str(state.logs) in caught.value.hint
        if faults.get("d0") == "exit":
            told = [e.state for e in events if e.stage is Stage.LOG]
            assert told == ["double: exit", "double: cannot find the weights"]
        assert_nothing_left(state, record)


@pytest.mark.engine
async def test_an_agent_that_cannot_listen_fails_the_launch(tmp_path: Path) -> None:
    """Its own log is shown, with the reason in it."""
    events: list[LaunchEvent] = []
    with prepared(tmp_path) as (state, record):
        port = record.plan.agent_ports["local"]
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)
        async with listener:
            with pytest.raises(LaunchError, match="ended at once"):
                await launch(state, record, events.append, wait_timeout_s=60)
        assert any("address already in use" in e.state for e in events if e.stage is Stage.LOG)
        assert_nothing_left(state, record)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("stage", "state"),
    [
        (Stage.AGENT, "starting"),
        (Stage.AGENT, "ready"),
        (Stage.REPLICA, "starting"),
        (Stage.REPLICA, "ready"),
        (Stage.ROUTER, "starting"),
        (Stage.ROUTER, "ready"),
        (Stage.PAIR, "waiting"),
        (Stage.PAIR, "canary"),
        (Stage.PAIR, "ready"),
    ],
)
async def test_an_interrupted_launch_leaves_nothing(
    tmp_path: Path, stage: Stage, state: str
) -> None:
    """R58, R17: cancelled at each of its steps, everything is stopped, and it says so."""
    hit: list[LaunchEvent] = []
    with prepared(tmp_path) as (folder, record), anyio.CancelScope() as scope:

        def emit(event: LaunchEvent) -> None:
            if (event.stage, event.state) == (stage, state) and not hit:
                hit.append(event)
                scope.cancel()

        with pytest.raises(InterruptedLaunch, match="interrupted by SIGHUP") as caught:
            await launch(folder, record, emit, wait_timeout_s=60, interrupted=lambda: "SIGHUP")
        assert caught.value.exit_code == 130
        assert hit
        assert_nothing_left(folder, record)


@pytest.mark.engine
async def test_a_relaunch_under_the_same_name_works(tmp_path: Path) -> None:
    """R62: after a failed launch, and after a down, the same state directory serves again."""
    with prepared(tmp_path) as (state, record):
        for _ in range(2):
            state.create_key()
            running = await launch(state, record, lambda event: None, wait_timeout_s=60)
            assert await take_down(state, running, lambda event: None) == ()
        assert_nothing_left(state, record)
