"""One process of a running cluster goes and comes back: drain, stop, start, rejoin.

It has rejoined when it is ready and every path of it whose other end serves has passed its
canary for the new incarnation.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

import anyio
import msgspec

from pdctl.engines.channel import MemberState, PairState
from pdctl.errors import ClusterError, PdctlError
from pdctl.runtime.agent.client import AgentCalls
from pdctl.runtime.agent.journal import ROUTER
from pdctl.runtime.agent.view import RouterState, Snapshot
from pdctl.runtime.change.draining import Told, wait_idle
from pdctl.runtime.cluster.keeper import agent_of, hosts_of, in_thread
from pdctl.runtime.cluster.placement import placement
from pdctl.runtime.cluster.state import ClusterRecord, StateDir
from pdctl.runtime.hosts.interface import RuntimeHost
from pdctl.runtime.launch.events import Emit, LaunchEvent, Stage
from pdctl.runtime.launch.progress import Progress, text_of
from pdctl.topology.model import Role
from pdctl.topology.plan import Plan

SERVING = frozenset({"ready", "draining"})
LOG_LINES = 20
LEAVE_S = 30.0
"""From being told to stop to not serving any more; the agent's own grace is shorter."""


class NotBack(ClusterError):
    """A process was started and did not rejoin."""


class Rolling:
    """Restarts on one running cluster, one after the other.

    Args:
        record: what runs, or is to run now.
        hosts: the way to every host of its plan.
        told: how many requests still run on what is being drained.
        patient: whether a process that ends is given its agent's further tries.
    """

    def __init__(
        self,
        state: StateDir,
        record: ClusterRecord,
        keeper: AgentCalls,
        hosts: Mapping[str, RuntimeHost],
        emit: Emit,
        *,
        told: Told = lambda count: None,
        patient: bool = True,
    ) -> None:
        self.state = state
        self.record = record
        self.keeper = keeper
        self.hosts = hosts
        self.emit = emit
        self.told = told
        self.patient = patient

    async def restart(self, name: str, *, drain_s: float | None, wait_s: float) -> None:
        """A replica, or "router".

        Args:
            drain_s: how long running requests may take; None: they are cut.
            wait_s: from its stop until it has rejoined.

        Raises:
            StillActive: requests still ran; it serves as before.
            NotBack: it did not rejoin; its agent keeps trying, unless that has given up.
        """
        before = await self.keeper.snapshot()
        if drain_s is not None and process(before, name).state in SERVING:
            await self.drain(name, drain_s)
        self._tell(name, "stopping")
        await self.keeper.restart(name)
        with anyio.CancelScope(shield=True), anyio.move_on_after(LEAVE_S):
            await self._follow(lambda s: has_left(s, before, name))
            await self.keeper.drain(name, undo=True)
        await self.rejoined(name, before, wait_s)

    async def drain(self, name: str, timeout_s: float) -> None:
        """Drains; where that does not succeed, it is as it was before."""
        self._tell(name, "draining")
        was = await self.keeper.drain(name)
        try:
            await wait_idle(self.keeper, name, timeout_s=timeout_s, told=self.told)
        except BaseException:  # a cancelled one must not stay closed either
            if not was:
                with anyio.CancelScope(shield=True):
                    await self.keeper.drain(name, undo=True)
            raise

    async def rejoined(self, name: str, before: Snapshot, wait_s: float) -> None:
        """Waits until it has rejoined, as another incarnation than in `before`."""
        progress = Progress(self.emit)

        def done(snapshot: Snapshot) -> bool:
            if not is_newer(snapshot, before, name):
                self._refuse_stuck(snapshot, name)
                return False
            progress.show(about(snapshot, name))
            return broken(snapshot, name, patient=self.patient) is not None or has_joined(
                snapshot, name, self.record.plan
            )

        with anyio.move_on_after(wait_s) as patience:
            await self._follow(done)
        last = await self.keeper.snapshot()
        trouble = broken(last, name, patient=self.patient)
        if patience.cancelled_caught:
            trouble = f"not back within {wait_s:g} s: {Progress.waiting(about(last, name))}"
        if trouble is not None:
            raise await self._not_back(name, trouble)

    async def _follow(self, done: Callable[[Snapshot], bool]) -> None:
        """Unbounded: put a deadline around it."""
        snapshot = await self.keeper.snapshot()
        while not done(snapshot):
            snapshot = await self.keeper.changes(snapshot.version)

    def _refuse_stuck(self, snapshot: Snapshot, name: str) -> None:
        found = process(snapshot, name)
        if found.state == "failed" and found.pid is not None:
            raise NotBack(f"{name} can't be stopped: {found.cause}")

    async def _not_back(self, name: str, cause: str) -> NotBack:
        """Shows the end of its log, wherever that lies."""
        sentence = f"{name} did not come back: {cause}"
        plan = self.record.plan
        host = self.hosts[plan.router_host if name == ROUTER else plan.replica(name).host]
        try:
            log = (await in_thread(placement, host, self.record, self.state)).log(name)
            raw = await in_thread(host.read, log) or b""
        except PdctlError as error:
            return NotBack(f"{sentence}; its log can't be read: {error.message}")
        for line in raw.decode("utf-8", "replace").splitlines()[-LOG_LINES:]:
            self.emit(LaunchEvent(stage=Stage.LOG, subject=name, state=line))
        far = self.record.topology.hosts[host.name].ssh is not None
        return NotBack(sentence, hint=f"its log is {log}{f' on {host.name}' if far else ''}")

    def _tell(self, name: str, state: str) -> None:
        stage = Stage.ROUTER if name == ROUTER else Stage.REPLICA
        self.emit(LaunchEvent(stage=stage, subject=name, state=state))


@contextlib.asynccontextmanager
async def rolling(
    state: StateDir,
    record: ClusterRecord,
    emit: Emit,
    *,
    told: Told = lambda count: None,
    patient: bool = True,
) -> AsyncIterator[Rolling]:
    """A `Rolling` with the way to the cluster's keeper and hosts; closed at the end."""
    with hosts_of(record) as hosts:
        keeper = await agent_of(record.plan.router_host, state, record, hosts)
        yield Rolling(state, record, keeper, hosts, emit, told=told, patient=patient)


def process(snapshot: Snapshot, name: str) -> MemberState | RouterState:
    """A replica, or the router, as in this picture."""
    if name == ROUTER:
        return snapshot.router or RouterState(state="stopped")
    return next(member for member in snapshot.members if member.name == name)


def is_newer(snapshot: Snapshot, before: Snapshot, name: str) -> bool:
    """Whether it has been started since."""
    then, now = process(before, name), process(snapshot, name)
    if isinstance(then, MemberState) and isinstance(now, MemberState):
        return now.incarnation > then.incarnation
    return now.restarts > then.restarts or (now.pid is not None and then.pid is None)


def has_left(snapshot: Snapshot, before: Snapshot, name: str) -> bool:
    """Whether it serves no more, or another incarnation does already."""
    return process(snapshot, name).state not in SERVING or is_newer(snapshot, before, name)


def paths_of(snapshot: Snapshot, name: str) -> tuple[PairState, ...]:
    """The announced paths that matter to it: those whose other end serves."""
    return tuple(
        path
        for path in (*snapshot.pairs, *snapshot.replicas)
        if _matters(snapshot, name, (path.prefill, path.decode))
    )


def _matters(snapshot: Snapshot, name: str, ends: tuple[str, str]) -> bool:
    ready = {member.name for member in snapshot.members if member.state == "ready"}
    return (name == ROUTER or name in ends) and set(ends) - {name} <= ready


def has_joined(snapshot: Snapshot, name: str, plan: Plan) -> bool:
    """Whether the router says of every path of the plan that matters to it that it is ready."""
    if process(snapshot, name).state != "ready":
        return False
    declared = [(pair.prefill, pair.decode) for pair in plan.pairs]
    declared += [(r.name, r.name) for r in plan.replicas if r.role is Role.BOTH]
    told = {(path.prefill, path.decode): path for path in paths_of(snapshot, name)}
    return all(
        ends in told and told[ends].state == "ready" and holds(told[ends], snapshot)
        for ends in declared
        if _matters(snapshot, name, ends)
    )


def holds(path: PairState, snapshot: Snapshot) -> bool:
    """Whether the router said this of the incarnations that run now."""
    now = {member.name: member.incarnation for member in snapshot.members}
    names = dict.fromkeys((path.prefill, path.decode))
    return path.incarnations == tuple(now.get(name, -1) for name in names)


def broken(snapshot: Snapshot, name: str, *, patient: bool) -> str | None:
    """Why it will not rejoin; None while it still may."""
    found = process(snapshot, name)
    ended = ("failed",) if patient else ("failed", "backoff", "stopped")
    if found.state in ended:
        return found.cause or f"it is {found.state}"
    for path in paths_of(snapshot, name):
        if path.state == "failed" and holds(path, snapshot):
            return f"{text_of(path)} failed its canary: {path.cause}"
    return None


def about(snapshot: Snapshot, name: str) -> Snapshot:
    """Only what concerns this one; its host only where that is not as it should be."""
    where = {m.host for m in snapshot.members if m.name == name}
    return msgspec.structs.replace(
        snapshot,
        hosts=tuple(h for h in snapshot.hosts if h.name in where and h.state != "ready"),
        members=tuple(m for m in snapshot.members if m.name == name),
        router=snapshot.router if name == ROUTER else None,
        pairs=tuple(p for p in snapshot.pairs if p in paths_of(snapshot, name)),
        replicas=tuple(p for p in snapshot.replicas if p in paths_of(snapshot, name)),
    )
