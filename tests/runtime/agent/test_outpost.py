"""A second host as the keeper holds it: a real agent with doubles of engines behind it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
import psutil
import pytest
from runtime.clusters import sweep, until, written
from runtime.nearby import NearbyHost

from pdctl.engines.channel import RUN_ENV, MemberState
from pdctl.errors import AgentLost
from pdctl.runtime.agent import outpost as module
from pdctl.runtime.agent.outpost import Outpost
from pdctl.runtime.cluster.state import ClusterRecord
from pdctl.runtime.machine import process
from pdctl.topology.model import Host

pytestmark = pytest.mark.anyio


class Held(NamedTuple):
    outpost: Outpost
    host: NearbyHost
    record: ClusterRecord
    changed: list[anyio.Event]

    def member(self, name: str) -> MemberState:
        return next(m for m in self.outpost.members() if m.name == name)

    async def until(self, *states: str) -> None:
        with anyio.fail_after(60):
            while self.outpost.state().state not in states:
                await self.changed[-1].wait()

    async def until_member(self, name: str, *states: str) -> MemberState:
        with anyio.fail_after(60):
            while self.member(name).state not in states:
                await self.changed[-1].wait()
        return self.member(name)


def on_far(record: ClusterRecord, python: str) -> ClusterRecord:
    """The same cluster with both replicas on a host "far", and the keeper elsewhere."""
    plan = record.plan
    replicas = tuple(msgspec.structs.replace(r, host="far") for r in plan.replicas)
    stores = tuple(msgspec.structs.replace(s, host="far") for s in plan.stores)
    ports = {**plan.agent_ports, "far": plan.agent_ports["local"]}
    topology = record.topology
    far = Host(name="far", ssh="far", python=python)
    hosts = {**topology.hosts, "far": far}
    return msgspec.structs.replace(
        record,
        plan=msgspec.structs.replace(plan, replicas=replicas, agent_ports=ports, stores=stores),
        topology=msgspec.structs.replace(topology, hosts=hosts),
    )


@asynccontextmanager
async def running(outpost: Outpost) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outpost.run)
        yield
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def held(folder: Path, *, found: bool = False, **options: object) -> AsyncIterator[Held]:
    """With `found`, the agent there was started by an earlier keeper."""
    with written(folder, **options) as (state, local):
        record = on_far(local, local.topology.hosts["local"].python or "")
        host = NearbyHost("far", folder / "far")
        changed = [anyio.Event()]

        def notify() -> None:
            changed.append(anyio.Event())
            changed[-2].set()

        *earlier, last = (
            Held(Outpost(host, record, key=state.read_key(), changed=notify), host, record, changed)
            for _ in range(2 if found else 1)
        )
        try:
            for one in earlier:
                async with running(one.outpost):
                    await one.until("ready")
            async with running(last.outpost):
                yield last
        finally:
            host.close()
            sweep(record)


async def test_it_starts_an_agent_there_and_shows_its_replicas(tmp_path: Path) -> None:
    """Keys and record lie 0600 under that host's own state home; shut down, nothing is left."""
    async with held(tmp_path) as far:
        await far.until("ready")
        await far.outpost.client.start("p0")
        ready = await far.until_member("p0", "ready")
        assert ready.clock_offset_s == far.host.clock_offset_s
        assert far.member("d0").state == "stopped"
        place = tmp_path / "far" / far.record.cluster / "hosts" / "far"
        assert {p.name for p in place.iterdir()} >= {"key", "cluster.json", "logs"}
        assert all(p.stat().st_mode & 0o077 == 0 for p in place.iterdir())
        await far.outpost.shut_down()
        await until("nothing is left", lambda: process.marked(far.record.run) == [])


@pytest.mark.engine
async def test_its_page_store_is_shown_while_it_is_reached(tmp_path: Path) -> None:
    """Planned, then as its own agent has it, then out of reach."""
    roles = {"o0": "both", "o1": "both"}
    async with held(tmp_path, roles=roles, sharing="[sharing]") as far:
        assert [store.state for store in far.outpost.stores()] == ["stopped"]
        await far.until("ready")
        with anyio.fail_after(60):
            while far.outpost.stores()[0].state != "ready":
                await far.changed[-1].wait()
        (store,) = far.outpost.stores()
        assert (store.name, store.host) == ("store-far", "far")
        assert store.pid is not None
        far.host.sever()
        await far.until("unreachable")
        assert far.outpost.stores()[0].state == "unreachable"
        far.host.mend()
        await far.until("ready")
        await far.outpost.shut_down()
        await until("nothing is left", lambda: process.marked(far.record.run) == [])


@pytest.mark.engine
async def test_a_cut_connection_hides_its_replicas_until_it_is_back(tmp_path: Path) -> None:
    """They run on and keep their incarnation: no canary is due for it."""
    async with held(tmp_path) as far:
        await far.until("ready")
        await far.outpost.client.start("p0")
        before = await far.until_member("p0", "ready")
        far.host.sever()
        lost = await far.until_member("p0", "unreachable")
        assert 'host "far" is unreachable' in (lost.cause or "")
        with pytest.raises(AgentLost, match="can't be reached"):
            _ = far.outpost.client
        far.host.mend()
        again = await far.until_member("p0", "ready")
        assert (again.pid, again.incarnation) == (before.pid, before.incarnation)
        await far.outpost.shut_down()


@pytest.mark.engine
async def test_an_agent_that_vanished_with_its_watchdog_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U35: at once; what still runs there is taken over, and requests reach it meanwhile."""
    monkeypatch.setattr(module, "WATCHDOG_S", 3600.0)
    async with held(tmp_path) as far:
        await far.until("ready")
        await far.outpost.client.start("p0")
        before = await far.until_member("p0", "ready")
        for mark in process.marked(far.record.run):
            if mark.pid != before.pid:
                os.kill(mark.pid, signal.SIGKILL)
        await far.until("unreachable", "starting")
        assert far.member("p0").state == "ready"
        await far.until("ready")
        again = await far.until_member("p0", "ready")
        assert again.pid == before.pid
        assert far.outpost.state().agent_restarts == 1
        await far.outpost.shut_down()
        await until("nothing is left", lambda: process.marked(far.record.run) == [])
    assert RUN_ENV not in os.environ


async def test_after_another_boot_no_watchdog_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U35: not even by a keeper that started neither of them and knows no process of theirs."""
    monkeypatch.setattr(module, "WATCHDOG_S", 3600.0)
    async with held(tmp_path, found=True) as far:
        await far.until("ready")
        assert far.outpost.state().agent_restarts == 0
        for mark in process.marked(far.record.run):
            os.kill(mark.pid, signal.SIGKILL)
        far.host.boot = "two"
        await far.until("unreachable", "starting")
        await far.until("ready")
        assert far.outpost.state().agent_restarts == 1
        await far.outpost.shut_down()
        await until("nothing is left", lambda: process.marked(far.record.run) == [])


async def test_without_another_boot_an_agent_is_left_to_its_watchdog(tmp_path: Path) -> None:
    """Which starts it again, and is not started a second time."""
    async with held(tmp_path, found=True) as far:
        await far.until("ready")
        by_parent = {psutil.Process(m.pid).ppid(): m for m in process.marked(far.record.run)}
        watchdog, agent = (by_parent[pid] for pid in (os.getpid(), by_parent[os.getpid()].pid))
        os.kill(agent.pid, signal.SIGKILL)
        await far.until("unreachable")
        await far.until("ready")
        assert far.outpost.state().agent_restarts == 0
        assert process.is_alive(watchdog)
        await far.outpost.shut_down()
