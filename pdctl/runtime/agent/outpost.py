"""Another host, as the keeper holds it: its connection, its agent, and what that one says.

One task per host, for good: connect, see that an agent runs there, follow its picture; at
whatever goes wrong, pause and begin again. Without the connection its replicas are
"unreachable": they may well run on, but no request reaches them. An agent that is away alone
changes nothing for them: requests go through the connection, not through the agent.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

import anyio
import msgspec

from pdctl.engines.channel import Failed, MemberState
from pdctl.errors import AgentLost, HostError, PdctlError
from pdctl.runtime.agent.client import AgentCalls, RelayedAgent, Relaying
from pdctl.runtime.agent.picture import planned
from pdctl.runtime.agent.stores import StoreState, planned_store
from pdctl.runtime.agent.view import HostState, Snapshot
from pdctl.runtime.cluster import placement
from pdctl.runtime.cluster.keeper import in_thread
from pdctl.runtime.cluster.placement import Placement
from pdctl.runtime.cluster.state import ClusterRecord
from pdctl.runtime.hosts.interface import Mark, RuntimeHost
from pdctl.runtime.hosts.ssh import Forward
from pdctl.topology.plan import Plan, ReplicaPlan

log = logging.getLogger("pdctl.agent")

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
AGENT_S = 30.0
"""From an agent's start there to its first answer."""
WATCHDOG_S = 10.0
"""How long an agent that does not answer is left to its own watchdog, where that may live."""
LOOK_EVERY_S = 0.2
SHUTDOWN_S = 45.0
"""For an agent to end all that it supervises, and itself."""


class FarHost(RuntimeHost, Relaying, Protocol):
    """A host behind a connection."""

    @property
    def round_trip_s(self) -> float | None: ...

    @property
    def clock_offset_s(self) -> float | None: ...

    @property
    def boot(self) -> str | None:
        """Of that machine, when the connection of this moment was made: another after every
        reboot."""
        ...

    def forward(self, wanted: tuple[Forward, ...]) -> None:
        """From now on these ports of this machine lead there. HostError: they can't."""
        ...

    @property
    def lost(self) -> threading.Event | None:
        """Set when the connection of this moment has ended; None where there was none yet."""
        ...


class Outpost:
    """One other host. Everything here belongs to the keeper's event loop.

    Args:
        changed: called whenever something that others see has changed; must not wait.
    """

    def __init__(
        self,
        host: FarHost,
        record: ClusterRecord,
        *,
        key: str,
        changed: Callable[[], None],
    ) -> None:
        self.name = host.name
        self.failures: tuple[Failed, ...] = ()
        self._stores: tuple[StoreState, ...] = ()
        self._host = host
        self._record = record
        self._key = key
        self._changed = changed
        self._plans = [r for r in record.plan.replicas if r.host == host.name]
        self._heard: dict[str, MemberState] = {}
        self._state = "connecting"
        self._cause: str | None = None
        self._client: AgentCalls | None = None
        self._place: Placement | None = None
        self._restarts = -1
        self._heard_through: threading.Event | None = None
        """`lost` of the connection by which the agent was last heard."""
        self._boot: str | None = None
        """Of that machine, when its agent was last reached."""
        self._watchdog: Mark | None = None
        """Of the latest agent that was started from here."""

    # -- what it shows

    def state(self) -> HostState:
        ready = self._state == "ready"
        return HostState(
            name=self.name,
            state=self._state,
            cause=self._cause,
            round_trip_s=self._host.round_trip_s if ready else None,
            clock_offset_s=self._host.clock_offset_s if ready else None,
            agent_restarts=max(0, self._restarts),
        )

    def members(self) -> tuple[MemberState, ...]:
        return tuple(self._member(plan) for plan in self._plans)

    def stores(self) -> tuple[StoreState, ...]:
        """Its page store, where it has one."""
        plan = self._record.plan.store(self.name)
        if plan is None:
            return ()
        found = self._stores[:1] or (planned_store(plan),)
        if self._state == "ready" or not self._stores or self._connected:
            return found
        return tuple(msgspec.structs.replace(s, state="unreachable") for s in found)

    def _member(self, plan: ReplicaPlan) -> MemberState:
        heard = self._heard.get(plan.name) or planned(plan)
        routed = msgspec.structs.replace(
            heard,
            http_host="127.0.0.1",
            http_port=plan.route_port or plan.http_port,
            clock_offset_s=self._host.clock_offset_s or 0.0,
        )
        if self._state == "ready" or plan.name not in self._heard or self._connected:
            return routed
        cause = f'host "{self.name}" is {self._state}: {self._cause or "no answer"}'
        return msgspec.structs.replace(routed, state="unreachable", cause=cause)

    @property
    def _connected(self) -> bool:
        """Ever since its agent was heard."""
        return self._heard_through is not None and not self._heard_through.is_set()

    # -- what the keeper does with it

    @property
    def client(self) -> AgentCalls:
        """Raises AgentLost while it can't be asked."""
        if self._client is None or self._state != "ready":
            raise AgentLost(
                f'host "{self.name}" can\'t be reached: {self._cause or self._state}',
                hint="`pdctl doctor` tests the way to it",
            )
        return self._client

    async def lay(self, record: ClusterRecord) -> None:
        """Makes the ways to the engines of a changed cluster; those of before stay for now.
        HostError where one can't be made."""
        await in_thread(self._host.forward, forwards_to(self.name, record.plan))

    def change(self, record: ClusterRecord) -> None:
        """Takes a changed cluster."""
        self._record = record
        self._plans = [r for r in record.plan.replicas if r.host == self.name]

    async def refresh(self) -> None:
        """Takes counters of this moment; keeps the old ones where none come."""
        with contextlib.suppress(PdctlError):
            self._take(await self.client.snapshot(fresh=True))

    async def run(self) -> None:
        """Ends by cancellation only."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._reach()
                pause_s = FIRST_PAUSE_S
                await self._follow()
            except PdctlError as error:
                log.warning("host=%s %s", self.name, error.message)
                self._turn("unreachable", error.message)
            await anyio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    async def shut_down(self) -> None:
        """Ends its agent and all that runs there, as far as it can be reached; bounded."""
        with contextlib.suppress(PdctlError), anyio.move_on_after(SHUTDOWN_S):
            client = self.client
            await client.shutdown()
            while True:
                await client.check(timeout_s=1.0)
                await anyio.sleep(LOOK_EVERY_S)

    async def _reach(self) -> None:
        if self._place is None:
            self._place = await in_thread(placement.placement, self._host, self._record)
        client = RelayedAgent(self.name, self._record.run, self._host, self._place.state)
        if self._restarts < 0 or not await self._answers_again(client):
            await self._start_agent(client, self._place)
        self._client = client
        self._take(await client.snapshot())
        self._boot = self._host.boot
        self._turn("ready", None)

    async def _answers_again(self, client: RelayedAgent) -> bool:
        """Whether it answers, be it after its watchdog had the time to start it anew."""
        if await self._answers(client, 0.0):
            return True
        return await self._is_watched() and await self._answers(client, WATCHDOG_S)

    async def _is_watched(self) -> bool:
        """Whether its watchdog may still live: nothing outlives its machine's boot."""
        if self._host.boot != self._boot:
            return False
        return self._watchdog is None or await in_thread(self._host.alive, self._watchdog)

    async def _start_agent(self, client: RelayedAgent, place: Placement) -> None:
        """At first, and where the watchdog there has gone too (a reboot, say)."""
        if await self._answers(client, 0.0):
            self._restarts = max(0, self._restarts)
            return
        self._turn("starting", None)
        await in_thread(
            partial(placement.deposit, self._host, place, self._record, key=self._key, api_key=None)
        )
        declared = self._record.topology.hosts[self.name]
        log.info("host=%s starting its agent", self.name)
        self._watchdog = await in_thread(
            partial(
                placement.start_agent,
                self._host,
                declared,
                self._record,
                state=place.state,
                log=place.log(f"agent-{self.name}"),
            )
        )
        self._restarts += 1
        if not await self._answers(client, AGENT_S):
            raise HostError(
                f'host "{self.name}": its agent does not answer within {AGENT_S:g} s',
                hint=f"its log there is {place.log(f'agent-{self.name}')}",
            )

    async def _answers(self, client: RelayedAgent, within_s: float) -> bool:
        until_s = anyio.current_time() + within_s
        while True:
            try:
                await client.check(timeout_s=5.0)
                return True
            except AgentLost:
                if anyio.current_time() >= until_s:
                    return False
            await anyio.sleep(LOOK_EVERY_S)

    async def _follow(self) -> None:
        version = 0
        while True:
            snapshot = await self.client.changes(version)
            version = snapshot.version
            self._take(snapshot)

    def _take(self, snapshot: Snapshot) -> None:
        self._heard_through = self._host.lost
        self._heard = {member.name: member for member in snapshot.members}
        self.failures = snapshot.failures
        self._stores = snapshot.stores
        self._changed()

    def _turn(self, state: str, cause: str | None) -> None:
        cause = cause and cause.removeprefix(f'host "{self.name}": ')
        if (state, cause) != (self._state, self._cause):
            self._state, self._cause = state, cause
            self._changed()


def forwards_to(host: str, plan: Plan) -> tuple[Forward, ...]:
    """From the router's host to the engines of another."""
    return tuple(
        Forward(local_port=replica.route_port, remote_port=replica.http_port)
        for replica in plan.replicas
        if replica.host == host and replica.route_port is not None
    )
