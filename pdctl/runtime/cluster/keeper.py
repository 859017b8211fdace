"""The way from a command to the cluster's keeper: the agent of the router's host."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar, cast

import anyio

from pdctl.runtime.agent.client import AgentCalls, AgentClient, RelayedAgent, Relaying
from pdctl.runtime.cluster.placement import placement
from pdctl.runtime.cluster.state import ClusterRecord, StateDir
from pdctl.runtime.hosts.interface import RuntimeHost
from pdctl.runtime.hosts.local import LocalHost

T = TypeVar("T")


def this_machine(record: ClusterRecord) -> dict[str, RuntimeHost]:
    """Every host of the plan, where all of them are this machine."""
    return {name: LocalHost(name) for name in record.plan.agent_ports}


async def agent_of(
    name: str, state: StateDir, record: ClusterRecord, hosts: Mapping[str, RuntimeHost]
) -> AgentCalls:
    """The agent of one host.

    Raises:
        ClusterError: the cluster's key is missing.
        HostError: the host can't be reached.
    """
    if record.topology.hosts[name].ssh is None:
        port = record.plan.agent_ports[name]
        return AgentClient(name, port, record.run, state.read_key())
    host = hosts[name]
    place = await in_thread(placement, host, record, state)
    return RelayedAgent(name, record.run, cast(Relaying, host), place.state)


@contextlib.asynccontextmanager
async def keeper_of(state: StateDir, record: ClusterRecord) -> AsyncIterator[AgentCalls]:
    """The keeper, for one command; its connection is closed at the end. Raises as `agent_of`."""
    with hosts_of(record) as hosts:
        yield await agent_of(record.plan.router_host, state, record, hosts)


@contextlib.contextmanager
def hosts_of(record: ClusterRecord) -> Iterator[Mapping[str, RuntimeHost]]:
    """The way to every host of the plan; connects where it is used, and closes at the end."""
    if all(record.topology.hosts[name].ssh is None for name in record.plan.agent_ports):
        yield this_machine(record)
        return
    from pdctl.runtime.hosts.reach import Hosts

    with Hosts(record.topology.hosts) as hosts:
        yield {name: hosts[name] for name in record.plan.agent_ports}


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Runs what blocks (hosts do) beside the event loop; waits for it even when cancelled."""
    return await anyio.to_thread.run_sync(partial(function, *arguments))
