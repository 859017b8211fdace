"""`pdctl down`: everything that `up` started, ended and proven."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial

import anyio

from pdctl.cli import render
from pdctl.cli.arguments import Cluster
from pdctl.cli.launch_view import Board, board
from pdctl.errors import ClusterError, HostError
from pdctl.runtime.cluster import lock
from pdctl.runtime.cluster.keeper import hosts_of, in_thread
from pdctl.runtime.cluster.placement import placement
from pdctl.runtime.cluster.state import ClusterRecord, StateDir, resolve
from pdctl.runtime.hosts.interface import RuntimeHost
from pdctl.runtime.launch.interruption import Interruption
from pdctl.runtime.launch.teardown import take_down


def down(
    topology: Cluster,
) -> None:
    """Stop everything that `up` started, and prove it: exit 0 means that nothing is left.

    No process, port, socket or key, on any host; logs stay until the next `up` of that name.
    Running requests are cut: `pdctl drain` first where they matter."""
    state = resolve(topology)
    name = state.path.name
    if not state.path.is_dir():
        return _nothing(name)
    with contextlib.ExitStack() as stack:
        stack.callback(state.prune)
        stack.enter_context(lock.held(state.lock, name))
        record = state.read()
        if record is None:
            state.clear()
            return _nothing(name)
        logs = stop(state, record)
        render.stdout().print(f"{name} is down; its logs are {logs}", soft_wrap=True)


def stop(state: StateDir, record: ClusterRecord) -> str:
    """Takes it down, and says where its logs lie; the caller holds the lock. Raises ClusterError
    where something is left."""
    with board() as shown:
        left, logs = anyio.run(partial(_take_down, state, record, shown))
    if left:
        raise ClusterError(
            f"not everything could be stopped: {'; '.join(left)}",
            hint=_again(record),
        )
    return logs


def _again(record: ClusterRecord) -> str:
    name = record.cluster
    if all(record.topology.hosts[host].ssh is None for host in record.plan.agent_ports):
        return f"end it by hand, then `pdctl down {name}` again"
    return (
        f"`pdctl doctor {name}` tests the way to each host; then `pdctl down {name}` again, which"
        " still knows all of it"
    )


def _logs(state: StateDir, record: ClusterRecord, hosts: Mapping[str, RuntimeHost]) -> str:
    """Blocks: asks the hosts."""
    places: list[str] = []
    for name in record.plan.agent_ports:
        if record.topology.hosts[name].ssh is None:
            places.insert(0, f"in {state.logs}")
            continue
        try:
            places.append(f"on {name} in {placement(hosts[name], record).logs}")
        except HostError:  # it is down all the same
            places.append(f"on {name}")
    return " and ".join(places)


def _nothing(name: str) -> None:
    render.stdout().print(f"{name} is not running: nothing to stop", soft_wrap=True)


async def _take_down(
    state: StateDir, record: ClusterRecord, shown: Board
) -> tuple[tuple[str, ...], str]:
    """(what is left, where the logs are)"""
    interruption = Interruption(partial(shown.say, "still stopping; it is bounded"))
    interruption.name = "taking down"
    with interruption.watching(), hosts_of(record) as hosts:
        left = await take_down(state, record, shown.show, hosts=hosts)
        return left, "" if left else await in_thread(_logs, state, record, hosts)
