"""The agent as its own process, with doubles of engines, spoken to as `up` and `ps` do."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import anyio
import psutil
import pytest
from runtime.agent.agents import agent
from runtime.clusters import answering, member, reach, start_agent

from pdctl.errors import AgentLost
from pdctl.runtime.agent import journal
from pdctl.runtime.agent.client import AgentClient
from pdctl.runtime.cluster.state import actor_key
from pdctl.runtime.machine import process
from pdctl.runtime.machine.process import ACTOR_KEY_ENV

pytestmark = pytest.mark.anyio


async def test_it_supervises_from_start_to_stop(tmp_path: Path) -> None:
    """Started replicas become ready, report counters of this moment, and are stopped whole."""
    async with agent(tmp_path, faults={"p0": "forks"}) as (_, record, client):
        await client.start("p0")
        await client.start("d0")
        ready = await reach(client, "p0", "ready")
        await reach(client, "d0", "ready")
        assert (ready.incarnation, ready.engine_version) == (1, "double")
        assert ready.http_port == record.plan.replica("p0").http_port
        fresh = await client.snapshot(fresh=True)
        assert member(fresh, "p0").counters.prompt_tokens == 5
        await client.stop("p0", 30)
        snapshot = await client.snapshot()
        assert member(snapshot, "p0").state == "stopped"
        assert member(snapshot, "p0").pid is None
        assert member(snapshot, "d0").state == "ready"
        assert process.marked(record.run, "p0") == []


@pytest.mark.engine
async def test_a_killed_replica_is_started_again(tmp_path: Path) -> None:
    """R61, U35: kill -9 on a replica; the agent brings it back as another incarnation."""
    async with agent(tmp_path) as (_, _record, client):
        await client.start("d0")
        before = await reach(client, "d0", "ready")
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)
        await reach(client, "d0", "backoff", "starting")
        after = await reach(client, "d0", "ready")
        assert (after.incarnation, after.restarts) == (2, 1)
        assert after.pid != before.pid


async def test_effective_values_that_differ_fail_by_name(tmp_path: Path) -> None:
    """R54: an engine that loaded another rope_theta is stopped, not served and not retried."""
    async with agent(tmp_path, faults={"d0": "wrong_theta"}) as (_, record, client):
        await client.start("d0")
        found = await reach(client, "d0", "failed")
        assert found.cause is not None
        assert "positions.rope_theta should be 10000.0, the engine has 10001.0" in found.cause
        await client.stop("d0", 30)
        assert process.marked(record.run, "d0") == []


async def test_no_secret_is_on_a_command_line_or_in_an_environment(tmp_path: Path) -> None:
    """Keys come over the socket: neither agent nor engine shows one to other processes."""
    async with agent(tmp_path) as (state, record, client):
        await client.start("p0")
        await reach(client, "p0", "ready")
        secrets = {state.read_key(), actor_key(state.read_key())}
        for mark in process.marked(record.run):
            shown = psutil.Process(mark.pid)
            environment = shown.environ()
            assert ACTOR_KEY_ENV not in environment
            text = " ".join([*shown.cmdline(), *environment.values()])
            assert not [secret for secret in secrets if secret in text]


@pytest.mark.engine
async def test_a_stranger_gets_no_answer(tmp_path: Path) -> None:
    """A caller with another key, or of another run, is not served."""
    async with agent(tmp_path) as (state, record, _client):
        port = record.plan.agent_ports["local"]
        with pytest.raises(AgentLost, match="does not answer"):
            await AgentClient("local", port, record.run, "00" * 32).check()
        with pytest.raises(AgentLost, match="another run"):
            await AgentClient("local", port, "another", state.read_key()).check()


@pytest.mark.engine
async def test_an_unstarted_process_can_not_attach_as_a_replica(tmp_path: Path) -> None:
    """A process that the agent did not start under that name is refused."""
    async with agent(tmp_path) as (_, record, client):
        await client.start("p0")
        await reach(client, "p0", "ready")
        stranger = await anyio.run_process(
            [sys.executable, "-c", DIAL, f"{record.socket_dir}/local.sock"],
            check=False,
        )
        assert b"is not the one that runs as p0" in stranger.stdout + stranger.stderr


DIAL = """
import sys
from pdctl.engines.attachment import Attachment
from pdctl.errors import PdctlError
from pdctl.handoff.counters import Counters
try:
    Attachment(sys.argv[1], "p0", counters=Counters).open(5)
except PdctlError as error:
    print(error.message)
"""


@pytest.mark.engine
async def test_sigterm_stops_everything_it_started(tmp_path: Path) -> None:
    """An agent that is told to end takes its replicas with it."""
    async with agent(tmp_path) as (_, record, client):
        await client.start("p0")
        await reach(client, "p0", "ready")
        mark = record.agents["local"].mark
        os.kill(mark.pid, signal.SIGTERM)
        with anyio.fail_after(60):
            await process.wait_exit(mark)
        assert process.marked(record.run) == []


async def test_a_new_agent_takes_over_what_the_killed_one_left(tmp_path: Path) -> None:
    """kill -9 on the agent: replicas serve on, the next agent adopts them by pid and birth,
    they attach again without a restart, and what died meanwhile is started anew."""
    async with agent(tmp_path) as (state, record, client):
        for name in ("p0", "d0"):
            await client.start(name)
        before = {name: await reach(client, name, "ready") for name in ("p0", "d0")}
        mark = record.agents["local"].mark
        os.kill(mark.pid, signal.SIGKILL)
        with anyio.fail_after(60):
            await process.wait_exit(mark)
        entries = {e.name: e for e in journal.read(state.journal("local")).entries}
        assert {n: e.mark.pid for n, e in entries.items() if e.mark} == {
            n: m.pid for n, m in before.items()
        }
        dead = before["d0"].pid
        assert dead is not None
        os.kill(dead, signal.SIGKILL)
        again = start_agent(state, record)
        second = await answering(state, again)
        adopted = await reach(second, "p0", "ready")
        assert (adopted.pid, adopted.incarnation) == (before["p0"].pid, 1)
        with anyio.fail_after(60):
            snapshot = await second.snapshot(fresh=True)
            while member(snapshot, "p0").counters.prompt_tokens == 0:
                await anyio.sleep(0.05)
                snapshot = await second.snapshot(fresh=True)
        revived = await reach(second, "d0", "ready")
        assert revived.incarnation == 2
        await second.shutdown()
        with anyio.fail_after(60):
            await process.wait_exit(again.agents["local"].mark)
        assert process.marked(record.run) == []


@pytest.mark.engine
async def test_an_agent_may_leave_its_replicas(tmp_path: Path) -> None:
    """Told to leave them, it ends alone."""
    async with agent(tmp_path) as (_, record, client):
        await client.start("p0")
        found = await reach(client, "p0", "ready")
        await client.shutdown(leave=True)
        mark = record.agents["local"].mark
        with anyio.fail_after(60):
            await process.wait_exit(mark)
        assert [m.pid for m in process.marked(record.run)] == [found.pid]


@pytest.mark.engine
async def test_a_long_poll_waits_for_the_next_version(tmp_path: Path) -> None:
    """R64: `changes` answers when something changed, and at its time-out otherwise."""
    async with agent(tmp_path) as (_, _record, client):
        now = await client.snapshot()
        same = await client.changes(now.version, 0.1)
        assert same.version == now.version
        async with anyio.create_task_group() as tasks:
            seen: list[int] = []

            async def wait() -> None:
                seen.append((await client.changes(now.version, 20)).version)

            tasks.start_soon(wait)
            await client.start("d0")
        assert seen[0] > now.version
        await reach(client, "d0", "ready")
