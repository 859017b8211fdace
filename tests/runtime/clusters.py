"""Clusters of test doubles: a topology whose `python` is a wrapper that runs `double.py`."""

from __future__ import annotations

import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import msgspec
from ports import free_port

from pdctl.engines.channel import RUN_ENV, MemberState
from pdctl.engines.interface import Command
from pdctl.errors import AgentLost
from pdctl.runtime.agent.client import AgentClient
from pdctl.runtime.agent.view import Snapshot
from pdctl.runtime.cluster.state import AgentRecord, ClusterRecord, StateDir
from pdctl.runtime.hosts.interface import Mark
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.machine import process
from pdctl.topology.contract import Attention, Contract, Positions
from pdctl.topology.load import loads
from pdctl.topology.model import Dtype, Topology
from pdctl.topology.plan import derive

DOUBLE = Path(__file__).with_name("double.py")
WAIT_S = 60.0
"""Far beyond anything that passes; only a failing test waits for it."""


def wrapper(folder: Path) -> Path:
    """An interpreter that runs the double instead of an engine's server."""
    path = folder / "python-double"
    path.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f'  *mlx.server*) exec "{sys.executable}" "{DOUBLE}" "$@" ;;\n'
        f'  *) exec "{sys.executable}" "$@" ;;\n'
        "esac\n"
    )
    path.chmod(0o755)
    return path


def topology_text(
    folder: Path,
    *,
    name: str | None = None,
    faults: dict[str, str] | None = None,
    roles: dict[str, str] | None = None,
    model: Path | None = None,
    sharing: str = "",
) -> str:
    """A topology of doubles; `faults` maps a replica to its fault, `sharing` is that section."""
    faults = faults or {}
    head = f"""
schema = 1
name = "{name or f"t-{uuid.uuid4().hex[:8]}"}"
[model]
name = "tiny"
context_length = 256
[handoff]
buffer_bytes = "1MiB"
[router]
bind = "127.0.0.1:{free_port()}"
{sharing}
[hosts.local]
python = "{wrapper(folder)}"
"""
    replicas = [
        f"""
[[replicas]]
name = "{replica}"
engine = "mlx"
role = "{role}"
model = "{model or folder}"
compute_dtype = "float32"
env = {{ DOUBLE = "{faults.get(replica, "")}" }}
"""
        for replica, role in (roles or {"p0": "prefill", "d0": "decode"}).items()
    ]
    return head + "".join(replicas)


def contract() -> Contract:
    return Contract(
        weights="w",
        tokenizer="t",
        chat_template="c",
        attention=Attention(kind="full", layers=2, kv_heads=1, head_dim=8),
        positions=Positions(rope_theta=10000.0, max_positions=512, context_length=256),
        dtype=Dtype.FLOAT16,
    )


def declared(folder: Path, **options: object) -> Topology:
    topology, found = loads(topology_text(folder, **options))  # type: ignore[arg-type]
    assert topology is not None, found
    return topology


@contextmanager
def written(folder: Path, **options: object) -> Iterator[tuple[StateDir, ClusterRecord]]:
    """A state directory as `up` writes it just before it starts the agent."""
    topology = declared(folder, **options)
    busy = frozenset(one.port for one in LocalHost().survey.listeners())
    state = StateDir(folder / "state" / topology.name)
    state.make()
    state.create_key()
    record = ClusterRecord(
        run=uuid.uuid4().hex,
        phase="starting",
        created_at=time.time(),
        topology_path=str(folder / "topology.toml"),
        topology=topology,
        plan=derive(topology, contract(), busy={"local": busy}),
        contract=contract(),
    )
    state.write(record)
    yield state, record


async def until(what: str, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Waits until `condition` holds; for what nothing can signal."""
    with anyio.move_on_after(timeout_s):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.02)
        return
    raise AssertionError(f"after {timeout_s} s still not: {what}")


def start_agent(state: StateDir, record: ClusterRecord) -> ClusterRecord:
    """Starts an agent for the written state, and notes it there as `up` does."""
    command = Command(
        argv=(
            *(sys.executable, "-m", "pdctl.runtime.agent"),
            *("--state", str(state.path), "--host", "local"),
        ),
        env={RUN_ENV: record.run},
    )
    mark = LocalHost().spawn(command, log=str(state.log("agent-local")))
    agent = AgentRecord(port=record.plan.agent_ports["local"], mark=mark)
    record = msgspec.structs.replace(record, agents={"local": agent})
    state.write(record)
    return record


async def answering(state: StateDir, record: ClusterRecord) -> AgentClient:
    """A client of that agent, once it answers."""
    port = record.plan.agent_ports["local"]
    client = AgentClient("local", port, record.run, state.read_key())
    with anyio.fail_after(WAIT_S):
        while True:
            try:
                await client.check()
                return client
            except AgentLost:
                await anyio.sleep(0.05)


def member(snapshot: Snapshot, name: str) -> MemberState:
    return next(m for m in snapshot.members if m.name == name)


async def reach(
    client: AgentClient, name: str, *states: str, timeout_s: float = WAIT_S
) -> MemberState:
    """Waits, from version to version, until a replica is in one of these states."""
    version = 0
    with anyio.fail_after(timeout_s):
        while True:
            snapshot = await client.changes(version)
            found = member(snapshot, name)
            if found.state in states:
                return found
            version = snapshot.version


def sweep(record: ClusterRecord) -> list[Mark]:
    """Kills what is left of a run, whatever a test did; returns what there was."""
    left = process.marked(record.run)
    for mark in left:
        process.signal_group(mark, signal.SIGKILL)
    LocalHost().remove(record.socket_dir)
    return left
