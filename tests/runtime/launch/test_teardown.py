from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from ports import free_port
from runtime.clusters import answering, reach, start_agent, sweep, written
from runtime.nearby import NearbyHost

from pdctl.engines.channel import RUN_ENV
from pdctl.engines.interface import Command
from pdctl.errors import HostError
from pdctl.runtime.agent import journal
from pdctl.runtime.agent.journal import Entry, Journal
from pdctl.runtime.cluster.placement import placement
from pdctl.runtime.cluster.state import ClusterRecord, StateDir
from pdctl.runtime.hosts.interface import Mark
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.hosts.local_survey import LocalSurvey
from pdctl.runtime.hosts.survey import Listener
from pdctl.runtime.launch import teardown
from pdctl.runtime.launch.events import LaunchEvent
from pdctl.runtime.launch.teardown import take_down
from pdctl.runtime.machine import process
from pdctl.topology.model import Host

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[tuple[StateDir, ClusterRecord]]:
    """An agent with two replicas that are ready."""
    with written(folder, **options) as (state, record):
        try:
            record = start_agent(state, record)
            client = await answering(state, record)
            for name in ("p0", "d0"):
                await client.start(name)
            for name in ("p0", "d0"):
                await reach(client, name, "ready")
            yield state, record
        finally:
            sweep(record)


async def kill_agent(record: ClusterRecord) -> None:
    mark = record.agents["local"].mark
    os.kill(mark.pid, signal.SIGKILL)
    with anyio.fail_after(60):
        await process.wait_exit(mark)


def only_logs(state: StateDir) -> bool:
    return [p.name for p in state.path.iterdir()] == ["logs"]


@pytest.mark.engine
async def test_down_through_the_agent(tmp_path: Path) -> None:
    """The agent is asked, ends its replicas and itself; nothing of the run is left."""
    stopped: list[LaunchEvent] = []
    async with running(tmp_path) as (state, record):
        assert await take_down(state, record, stopped.append) == ()
        assert sorted(e.subject for e in stopped) == ["agent", "d0", "p0"]
        assert process.marked(record.run) == []
        assert LocalHost().read(f"{record.socket_dir}/local.sock") is None
        assert only_logs(state)


async def test_down_of_an_agent_that_was_killed(tmp_path: Path) -> None:
    """U26: its journal names the replicas; they are stopped without it."""
    stopped: list[LaunchEvent] = []
    async with running(tmp_path, faults={"p0": "forks"}) as (state, record):
        await kill_agent(record)
        assert await take_down(state, record, stopped.append) == ()
        assert {"p0", "d0"} <= {e.subject for e in stopped}
        assert "agent" not in {e.subject for e in stopped}
        assert process.marked(record.run) == []
        assert only_logs(state)


async def test_down_without_a_journal(tmp_path: Path) -> None:
    """U33: with agent and journal gone, the run's mark in the processes is enough."""
    async with running(tmp_path) as (state, record):
        await kill_agent(record)
        state.journal("local").unlink()
        assert await take_down(state, record, lambda event: None) == ()
        assert process.marked(record.run) == []
        assert only_logs(state)


@pytest.mark.engine
async def test_down_with_an_agent_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R23: a stopped agent answers nothing; it is killed, and the rest is stopped directly."""
    monkeypatch.setattr(teardown, "REPLICA_GRACE_S", 0.3)
    async with running(tmp_path) as (state, record):
        os.kill(record.agents["local"].mark.pid, signal.SIGSTOP)
        assert await take_down(state, record, lambda event: None) == ()
        assert process.marked(record.run) == []


@pytest.mark.engine
async def test_a_cancelled_down_goes_on(tmp_path: Path) -> None:
    """R17: taking down is shielded."""
    async with running(tmp_path) as (state, record):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await take_down(state, record, lambda event: None)
        assert process.marked(record.run) == []
        assert only_logs(state)


async def test_down_twice_finds_nothing_the_second_time(tmp_path: Path) -> None:
    """Idempotent: whatever is gone already is no error."""
    with written(tmp_path) as (state, record):
        assert await take_down(state, record, lambda event: None) == ()
        assert await take_down(state, record, lambda event: None) == ()
        assert only_logs(state)


class OddSurvey(LocalSurvey):
    def __init__(self, listeners: list[Listener]) -> None:
        super().__init__()
        self._listeners = listeners

    def listeners(self) -> list[Listener]:
        return self._listeners


class OddHost(LocalHost):
    """This machine, with faults laid over it."""

    def __init__(self, listeners: list[Listener] | None = None, *, deathless: bool = False):
        super().__init__("local")
        self.survey = OddSurvey(listeners or [])
        self._deathless = deathless

    def signal(self, mark: Mark, number: int) -> None:
        if not self._deathless:
            super().signal(mark, number)

    def remove(self, path: str) -> None:
        if self._deathless:
            raise HostError(f"{path} can't be removed")
        super().remove(path)


@pytest.mark.engine
async def test_what_the_keeper_ends_on_another_host_is_named(tmp_path: Path) -> None:
    """A replica there is among what was stopped; it is kept where its logs lie."""
    stopped: list[LaunchEvent] = []
    async with running(tmp_path) as (state, local):
        record = with_far(local)
        far = NearbyHost("far", tmp_path / "far")
        place = placement(far, record)
        far.make_dir(place.state)
        until_p0_ends = f"while kill -0 {replica_pid(state, 'p0')} 2>&-; do sleep 0.05; done"
        mark = far.spawn(Command(argv=("sh", "-c", until_p0_ends)), log=f"{tmp_path}/d9.log")
        entry = Entry(name="d9", mark=mark, started_at=1.0, incarnation=1, restarts=0, wanted=True)
        journal.write(Path(place.state, "agent-far.json"), Journal(entries=(entry,)))
        hosts = {"local": LocalHost(), "far": far}
        assert await take_down(state, record, stopped.append, hosts=hosts) == ()
        far.close()
        assert not process.is_alive(mark)
        assert sorted(e.subject for e in stopped) == ["agent", "d0", "d9", "p0"]
        assert only_logs(state)
        ended = state.read_ended()
        assert ended is not None
        assert ended.plan == record.plan


def with_far(record: ClusterRecord) -> ClusterRecord:
    """The same cluster with an agent on a host "far"."""
    topology, plan = record.topology, record.plan
    hosts = {**topology.hosts, "far": Host(name="far", ssh="far")}
    ports = {**plan.agent_ports, "far": free_port()}
    return msgspec.structs.replace(
        record,
        topology=msgspec.structs.replace(topology, hosts=hosts),
        plan=msgspec.structs.replace(plan, agent_ports=ports),
    )


def replica_pid(state: StateDir, name: str) -> int:
    entry = journal.read(state.journal("local")).entry(name)
    assert entry is not None
    assert entry.mark is not None
    return entry.mark.pid


async def test_what_does_not_end_is_named_and_the_state_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R17, R18: every step is tried, every leftover named, and `down` can be tried again."""
    monkeypatch.setattr(teardown, "KILL_S", 0.1)
    with written(tmp_path) as (state, record):
        command = Command(argv=("sleep", "600"), env={RUN_ENV: record.run})
        mark = LocalHost().spawn(command, log=str(state.log("p0")))
        host = OddHost(deathless=True)
        left = await take_down(state, record, lambda event: None, hosts={"local": host})
        assert left == (f'host "local": process {mark.pid} is still there',)
        LocalHost().signal(mark, signal.SIGKILL)
        left = await take_down(state, record, lambda event: None, hosts={"local": host})
        assert any("can't be removed" in sentence for sentence in left)
        kept = state.read()
        assert kept is not None
        assert kept.phase == "stopping"
        assert await take_down(state, kept, lambda event: None) == ()
        assert only_logs(state)


async def test_a_port_that_still_listens_is_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A younger process on a port of the plan is named; one older than the cluster is not."""
    monkeypatch.setattr(teardown, "PORTS_S", 0.1)
    with written(tmp_path) as (state, record):
        port = min(record.plan.ports("local"))
        for since, expected in ((time.time() + 60, 1), (record.created_at - 60, 0)):
            host = OddHost([Listener(port=port, pid=4711, since=since)])
            left = await take_down(state, record, lambda event: None, hosts={"local": host})
            assert len(left) == expected
        assert only_logs(state)


async def test_another_run_is_left_alone(tmp_path: Path) -> None:
    """Processes of a second cluster of the same user are not touched."""
    with written(tmp_path) as (state, record):
        other = msgspec.structs.replace(record, run="another")
        command = Command(argv=("sleep", "600"), env={RUN_ENV: other.run})
        mark = LocalHost().spawn(command, log=str(state.log("p0")))
        try:
            assert await take_down(state, record, lambda event: None) == ()
            assert process.is_alive(mark)
        finally:
            sweep(other)
