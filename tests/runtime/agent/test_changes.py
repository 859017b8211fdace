"""A cluster that is changed while it runs, from the agent's end: doubles of engines, real agent."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import msgspec
import pytest
from runtime.agent.agents import agent
from runtime.clusters import answering, contract, declared, member, reach, start_agent

from pdctl.errors import ClusterError
from pdctl.runtime.agent.client import AgentClient
from pdctl.runtime.cluster.state import ClusterRecord, StateDir
from pdctl.runtime.machine import process
from pdctl.topology.plan import derive

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

THREE = {"p0": "prefill", "p1": "prefill", "d0": "decode"}


def changed(folder: Path, record: ClusterRecord, roles: dict[str, str]) -> ClusterRecord:
    topology = declared(folder, name=record.cluster, roles=roles)
    plan = derive(topology, contract(), kept=record.plan)
    return msgspec.structs.replace(record, topology=topology, plan=plan)


async def names(client: AgentClient) -> list[str]:
    return [member.name for member in (await client.snapshot()).members]


async def test_replicas_come_and_go(tmp_path: Path) -> None:
    """What stays is not touched; what goes must have been stopped; the record is written."""
    async with agent(tmp_path) as (state, record, client):
        await client.start("p0")
        before = await reach(client, "p0", "ready")
        await client.change(changed(tmp_path, record, THREE))
        assert await names(client) == ["p0", "p1", "d0"]
        assert os.stat(state.path / "cluster.json").st_mode & 0o777 == 0o600
        await client.start("p1")
        await reach(client, "p1", "ready")
        fewer = changed(tmp_path, record, {"p0": "prefill", "d0": "decode"})
        with pytest.raises(ClusterError, match="p1 is ready, not stopped"):
            await client.change(fewer)
        await client.stop("p1", 30)
        await client.change(fewer)
        await client.change(fewer)
        assert await names(client) == ["p0", "d0"]
        assert process.marked(record.run, "p1") == []
        assert (await reach(client, "p0", "ready")).pid == before.pid
        assert state.read() == fewer


async def test_the_record_of_another_run_is_refused(tmp_path: Path) -> None:
    async with agent(tmp_path) as (state, record, client):
        other = msgspec.structs.replace(changed(tmp_path, record, THREE), run="0" * 32)
        with pytest.raises(ClusterError, match="another run"):
            await client.change(other)
        assert state.read() == record
        assert await names(client) == ["p0", "d0"]


async def again(state: StateDir, record: ClusterRecord) -> tuple[ClusterRecord, AgentClient]:
    """kill -9 on the agent, and the next one."""
    mark = record.agents["local"].mark
    os.kill(mark.pid, signal.SIGKILL)
    with anyio.fail_after(60):
        await process.wait_exit(mark)
    record = start_agent(state, record)
    return record, await answering(state, record)


async def test_the_next_agent_knows_who_drains(tmp_path: Path) -> None:
    """The mark is in the journal: whoever takes the replica over keeps it closed."""
    async with agent(tmp_path) as (state, record, client):
        await client.start("p0")
        await reach(client, "p0", "ready")
        assert await client.drain("p0") is False
        assert await client.drain("p0") is True
        assert member(await client.snapshot(), "p0").state == "draining"
        record, second = await again(state, record)
        adopted = await reach(second, "p0", "draining", "ready")
        assert (adopted.state, adopted.incarnation) == ("draining", 1)
        assert await second.drain("p0", undo=True) is True
        assert member(await second.snapshot(), "p0").state == "ready"
        await second.shutdown()
        with anyio.fail_after(60):
            await process.wait_exit(record.agents["local"].mark)
