"""`down`: everything of one `up` is ended, on every host, and that is proven.

Through the agent where it answers, else by its journal, else by the run's mark in the
processes' environment. Every step is tried whatever became of the one before; the proof at
the end looks at processes, ports and sockets, and is all that counts.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial

import anyio
import msgspec

from pdctl.errors import AgentLost, ClusterError, PdctlError
from pdctl.runtime.agent import journal
from pdctl.runtime.cluster.keeper import agent_of, in_thread, this_machine
from pdctl.runtime.cluster.placement import Placement, clear, placement
from pdctl.runtime.cluster.state import ClusterRecord, StateDir
from pdctl.runtime.hosts.interface import Mark, RuntimeHost
from pdctl.runtime.launch.events import Emit, LaunchEvent, Stage
from pdctl.trace import monotonic_s

AGENT_END_S = 60.0
"""For an agent to end all that it supervises, one grace after the other, and itself."""
REPLICA_GRACE_S = 10.0
KILL_S = 5.0
LOOK_EVERY_S = 0.05
"""Between two looks at a process that was told to end; a remote host can't do better."""
PORTS_S = 3.0
AGENT_LINGER_S = 2.0
"""From an agent's last answer to the end of its process and its watchdog's."""
SWEEPS = 3
"""A process may start another between a look and its end."""


async def take_down(
    state: StateDir,
    record: ClusterRecord,
    emit: Emit,
    *,
    hosts: Mapping[str, RuntimeHost] | None = None,
) -> tuple[str, ...]:
    """Ends the cluster and clears its state. Shielded and bounded; the caller holds the lock.

    What lives is noted everywhere; then the keeper, which ends the other agents; then, on every
    host, whatever agent still answers; then what is left without one. Hosts that share a machine
    may not tear at each other's processes before all agents had their turn.

    Args:
        hosts: the way to every host of the plan; None: all of them are this machine.

    Returns:
        What is left, a sentence each; empty when nothing is. State is kept while something is.
    """
    hosts = hosts or this_machine(record)
    with anyio.CancelScope(shield=True):
        record = msgspec.structs.replace(record, phase="stopping")
        state.write(record)
        keeper, *others = (_Ending(state, record, hosts[n], emit) for n in _keeper_first(record))
        endings = (keeper, *others)
        await _each(endings, _Ending.look)
        await keeper.attempt(keeper.ask)
        await _each(others, _Ending.ask)
        await _each(endings, _Ending.end)
        await _each(endings, _Ending.prove)
        if not any(ending.left for ending in endings):
            for ending in endings:
                await ending.attempt(ending.clear)
        left = tuple(sentence for ending in endings for sentence in ending.left)
        if not left:
            if any(ending.is_far for ending in endings):
                state.write_ended(record)
            state.clear()
    return left


async def _each(endings: Iterable[_Ending], step: Callable[[_Ending], Awaitable[None]]) -> None:
    """All hosts at once."""
    async with anyio.create_task_group() as tasks:
        for ending in endings:
            tasks.start_soon(ending.attempt, partial(step, ending))


def _keeper_first(record: ClusterRecord) -> list[str]:
    keeper = record.plan.router_host
    return sorted(record.plan.agent_ports, key=lambda name: name != keeper)


class _Ending:
    """One host's processes. A failing step is noted and skips none of the others, but where
    the host can't be reached: every one of them would wait for it again."""

    def __init__(
        self, state: StateDir, record: ClusterRecord, host: RuntimeHost, emit: Emit
    ) -> None:
        self.state = state
        self.record = record
        self.host = host
        self.emit = emit
        self.left: list[str] = []
        self._known: dict[str, Mark] = {}
        self._agent_ran = False
        self._place: Placement | None = None
        self._unreachable = False

    async def attempt(self, step: Callable[[], Awaitable[None]]) -> None:
        if self._unreachable:
            return
        try:
            await step()
        except PdctlError as error:
            self._unreachable = self.is_far
            if error.message not in self.left:
                self.left.append(error.message)

    @property
    def is_far(self) -> bool:
        return self.record.topology.hosts[self.host.name].ssh is not None

    async def look(self) -> None:
        """What of it lives, by its journal."""
        mark = self._agent_mark
        if mark is not None and await in_thread(self.host.alive, mark):
            self._agent_ran = True
        self._known |= await self._living()

    async def ask(self) -> None:
        """Its agent, where there is one, to end everything and itself."""
        try:
            agent = await agent_of(
                self.host.name, self.state, self.record, {self.host.name: self.host}
            )
            await agent.check()
            await agent.shutdown()
            until_s = monotonic_s() + AGENT_END_S
            while monotonic_s() < until_s:
                await agent.check(timeout_s=2.0)
                await anyio.sleep(LOOK_EVERY_S)
        except (AgentLost, ClusterError):
            pass
        mark = self._agent_mark
        if mark is not None:
            await self._gone(mark, AGENT_LINGER_S)
        self._known |= await self._living()

    async def end(self) -> None:
        """Whatever is left, agent or not."""
        agent = self._agent_mark
        if agent is not None and await in_thread(self.host.alive, agent):
            await self._stop(agent, REPLICA_GRACE_S)
        for name, mark in self._known.items():
            if await in_thread(self.host.alive, mark):
                await self._stop(mark, REPLICA_GRACE_S)
            self._stopped(name, mark)
        if agent is not None and self._agent_ran:
            self._stopped("agent", agent)
        for sweep in range(SWEEPS):
            marks = await self._marked(AGENT_LINGER_S if sweep == 0 else 0.0)
            for mark in marks:
                await self._stop(mark, 0.0)
                self._stopped("leftover process", mark)
            if not marks:
                break

    async def _marked(self, within_s: float) -> list[Mark]:
        """What carries the run's mark, once that is nothing or `within_s` have passed."""
        until_s = monotonic_s() + within_s
        while True:
            marks = await in_thread(self.host.marked, self.record.run)
            if not marks or monotonic_s() >= until_s:
                return marks
            await anyio.sleep(LOOK_EVERY_S)

    async def prove(self) -> None:
        """Notes what of this run still exists, a sentence each."""
        name = self.host.name
        self.left += [
            f'host "{name}": process {mark.pid} is still there'
            for mark in await in_thread(self.host.marked, self.record.run)
        ]
        self.left += await _listening(self.record, self.host)

    async def clear(self) -> None:
        place = await self._placed()
        await in_thread(self.host.remove, place.socket_dir)
        if self.is_far:
            await in_thread(clear, self.host, place)

    async def _placed(self) -> Placement:
        if self._place is None:
            self._place = await in_thread(placement, self.host, self.record, self.state)
        return self._place

    async def _living(self) -> dict[str, Mark]:
        """What runs of it, by name, in the order in which it is to be stopped."""
        place = await self._placed()
        raw = await in_thread(self.host.read, f"{place.state}/agent-{self.host.name}.json")
        marks = {e.name: e.mark for e in journal.decode(raw).stop_order if e.mark is not None}
        return {n: m for n, m in marks.items() if await in_thread(self.host.alive, m)}

    @property
    def _agent_mark(self) -> Mark | None:
        """Of an agent that this machine's command started; the keeper started the others."""
        agent = self.record.agents.get(self.host.name)
        return agent.mark if agent is not None else None

    async def _stop(self, mark: Mark, grace_s: float) -> None:
        if grace_s:
            await in_thread(self.host.signal, mark, int(signal.SIGTERM))
            if await self._gone(mark, grace_s):
                return
        await in_thread(self.host.signal, mark, int(signal.SIGKILL))
        await self._gone(mark, KILL_S)

    async def _gone(self, mark: Mark, within_s: float) -> bool:
        until_s = monotonic_s() + within_s
        while await in_thread(self.host.alive, mark):
            if monotonic_s() >= until_s:
                return False
            await anyio.sleep(LOOK_EVERY_S)
        return True

    def _stopped(self, name: str, mark: Mark) -> None:
        self.emit(LaunchEvent(stage=Stage.STOP, subject=name, state="stopped", pid=mark.pid))


async def _listening(record: ClusterRecord, host: RuntimeHost) -> list[str]:
    """Ports of the plan that a process younger than the cluster listens on; a closed socket
    may take a moment to go."""
    wanted = record.plan.ports(host.name)
    until_s = monotonic_s() + PORTS_S
    while True:
        busy = [
            one
            for one in await in_thread(host.survey.listeners)
            if one.port in wanted and one.since is not None and one.since >= record.created_at
        ]
        if not busy or monotonic_s() >= until_s:
            return [
                f'host "{host.name}": port {one.port} still listens (process {one.pid})'
                for one in busy
            ]
        await anyio.sleep(LOOK_EVERY_S)
