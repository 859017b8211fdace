"""`down`: everything of one `up` is ended, on every host, and that is proven.

Through the agent where it answers, else by its journal, else by the run's mark in the
processes' environment. Every step is tried whatever became of the one before; the proof at
the end looks at processes, ports and sockets, and is all that counts.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import anyio
import msgspec

from pdctl.errors import AgentLost, ClusterError, PdctlError
from pdctl.runtime.agent import journal
from pdctl.runtime.agent.client import AgentClient
from pdctl.runtime.events import Emit, LaunchEvent, Stage
from pdctl.runtime.hosts.interface import Mark, RuntimeHost
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.state import ClusterRecord, StateDir
from pdctl.topology.model import Host
from pdctl.trace import monotonic_s

AGENT_END_S = 60.0
"""For an agent to end all that it supervises, one grace after the other, and itself."""
REPLICA_GRACE_S = 10.0
KILL_S = 5.0
LOOK_EVERY_S = 0.05
"""Between two looks at a process that was told to end; a remote host can't do better."""
PORTS_S = 3.0

Reach = Callable[[Host], RuntimeHost]
T = TypeVar("T")


def local(host: Host) -> RuntimeHost:
    return LocalHost(host.name)


async def take_down(
    state: StateDir, record: ClusterRecord, emit: Emit, *, reach: Reach = local
) -> tuple[str, ...]:
    """Ends the cluster and clears its state. Shielded and bounded; the caller holds the lock.

    Returns:
        What is left, a sentence each; empty when nothing is. State is kept while something is.
    """
    hosts = {n: reach(record.topology.hosts[n]) for n in record.plan.agent_ports}
    left: list[str] = []
    with anyio.CancelScope(shield=True):
        record = msgspec.structs.replace(record, phase="stopping")
        state.write(record)
        for host in hosts.values():
            try:
                await _Ending(state, record, host, emit).run()
            except PdctlError as error:
                left.append(error.message)
        left += await _leftovers(record, hosts)
        if not left:
            state.clear()
    return tuple(left)


class _Ending:
    """One host's processes."""

    def __init__(
        self, state: StateDir, record: ClusterRecord, host: RuntimeHost, emit: Emit
    ) -> None:
        self.state = state
        self.record = record
        self.host = host
        self.emit = emit
        self.journal_path = state.journal(host.name)

    async def run(self) -> None:
        known = await self._living(journal.read(self.journal_path))
        agent = self.record.agents.get(self.host.name)
        if agent is not None and await _in_thread(self.host.alive, agent.mark):
            if not await self._asked(agent.port, agent.mark):
                await self._stop(agent.mark, REPLICA_GRACE_S)
            known |= await self._living(journal.read(self.journal_path))
            for name, mark in known.items():
                if not await _in_thread(self.host.alive, mark):
                    self._stopped(name, mark)
            self._stopped("agent", agent.mark)
        for name, mark in known.items():
            if await _in_thread(self.host.alive, mark):
                await self._stop(mark, REPLICA_GRACE_S)
                self._stopped(name, mark)
        for mark in await _in_thread(self.host.marked, self.record.run):
            await self._stop(mark, 0.0)
            self._stopped("leftover process", mark)
        await _in_thread(self.host.remove, self.record.socket_dir)

    async def _asked(self, port: int, mark: Mark) -> bool:
        """Whether the agent, asked to, ended everything and itself."""
        try:
            key = self.state.read_key()
            client = AgentClient(self.host.name, port, self.record.run, key)
            await client.check()
            await client.shutdown()
        except (AgentLost, ClusterError):
            return False
        return await self._gone(mark, AGENT_END_S)

    async def _stop(self, mark: Mark, grace_s: float) -> None:
        if grace_s:
            await _in_thread(self.host.signal, mark, int(signal.SIGTERM))
            if await self._gone(mark, grace_s):
                return
        await _in_thread(self.host.signal, mark, int(signal.SIGKILL))
        await self._gone(mark, KILL_S)

    async def _gone(self, mark: Mark, within_s: float) -> bool:
        until_s = monotonic_s() + within_s
        while await _in_thread(self.host.alive, mark):
            if monotonic_s() >= until_s:
                return False
            await anyio.sleep(LOOK_EVERY_S)
        return True

    async def _living(self, known: journal.Journal) -> dict[str, Mark]:
        """What runs of it, by name, in the order in which it is to be stopped."""
        marks = {e.name: e.mark for e in known.stop_order if e.mark is not None}
        return {n: m for n, m in marks.items() if await _in_thread(self.host.alive, m)}

    def _stopped(self, name: str, mark: Mark) -> None:
        self.emit(LaunchEvent(stage=Stage.STOP, subject=name, state="stopped", pid=mark.pid))


async def _leftovers(record: ClusterRecord, hosts: Mapping[str, RuntimeHost]) -> list[str]:
    """The proof: what of this run still exists, a sentence each."""
    found = []
    for name, host in hosts.items():
        try:
            found += [
                f'host "{name}": process {mark.pid} is still there'
                for mark in await _in_thread(host.marked, record.run)
            ]
            found += await _listening(record, host)
        except PdctlError as error:
            found.append(error.message)
    return found


async def _listening(record: ClusterRecord, host: RuntimeHost) -> list[str]:
    """Ports of the plan that a process younger than the cluster listens on; a closed socket
    may take a moment to go."""
    wanted = record.ports(host.name)
    until_s = monotonic_s() + PORTS_S
    while True:
        busy = [
            one
            for one in await _in_thread(host.listeners)
            if one.port in wanted and one.since is not None and one.since >= record.created_at
        ]
        if not busy or monotonic_s() >= until_s:
            return [
                f'host "{host.name}": port {one.port} still listens (process {one.pid})'
                for one in busy
            ]
        await anyio.sleep(LOOK_EVERY_S)


async def _in_thread(function: Callable[..., T], *arguments: object) -> T:
    return await anyio.to_thread.run_sync(partial(function, *arguments))
