"""One process of a running cluster goes and comes back: drain, stop, start, rejoin.

It has rejoined when it is ready and every path of it whose other end serves has passed its
canary for the new incarnation.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import msgspec

from pdctl.engines.channel import MemberState, PairState
from pdctl.errors import ClusterError
from pdctl.runtime.agent.client import AgentClient
from pdctl.runtime.agent.journal import ROUTER
from pdctl.runtime.agent.view import RouterState, Snapshot
from pdctl.runtime.draining import Told, wait_idle
from pdctl.runtime.events import Emit, LaunchEvent, Stage
from pdctl.runtime.launch import LOG_LINES, last_lines
from pdctl.runtime.progress import Progress, text_of
from pdctl.runtime.state import StateDir

SERVING = frozenset({"ready", "draining"})
LEAVE_S = 30.0
"""From being told to stop to not serving any more; the agent's own grace is shorter."""


class NotBack(ClusterError):
    """A process was started and did not rejoin."""


class Rolling:
    """Restarts on one running cluster, one after the other.

    Args:
        told: how many requests still run on what is being drained.
        patient: whether a process that ends is given its agent's further tries.
    """

    def __init__(
        self,
        state: StateDir,
        keeper: AgentClient,
        emit: Emit,
        *,
        told: Told = lambda count: None,
        patient: bool = True,
    ) -> None:
        self.state = state
        self.keeper = keeper
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
            await self._follow(name, lambda s: has_left(s, before, name))
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
            trouble = broken(snapshot, name, patient=self.patient)
            if trouble is not None:
                raise self._not_back(name, trouble)
            return has_joined(snapshot, name)

        with anyio.move_on_after(wait_s):
            await self._follow(name, done)
            return
        waiting = Progress.waiting(about(await self.keeper.snapshot(), name))
        raise self._not_back(name, f"not back within {wait_s:g} s: {waiting}")

    async def _follow(self, name: str, done: Callable[[Snapshot], bool]) -> None:
        """Unbounded: put a deadline around it."""
        snapshot = await self.keeper.snapshot()
        while not done(snapshot):
            snapshot = await self.keeper.changes(snapshot.version)

    def _refuse_stuck(self, snapshot: Snapshot, name: str) -> None:
        found = process(snapshot, name)
        if found.state == "failed" and found.pid is not None:
            raise NotBack(f"{name} can't be stopped: {found.cause}")

    def _not_back(self, name: str, sentence: str) -> NotBack:
        log = self.state.log(name)
        for line in last_lines(log, LOG_LINES):
            self.emit(LaunchEvent(stage=Stage.LOG, subject=name, state=line))
        return NotBack(f"{name} did not come back: {sentence}", hint=f"its log is {log}")

    def _tell(self, name: str, state: str) -> None:
        stage = Stage.ROUTER if name == ROUTER else Stage.REPLICA
        self.emit(LaunchEvent(stage=stage, subject=name, state=state))


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
    """The paths that must be ready for it to have rejoined: those whose other end serves."""
    ready = {member.name for member in snapshot.members if member.state == "ready"}
    return tuple(
        path
        for path in (*snapshot.pairs, *snapshot.replicas)
        if name in (ROUTER, path.prefill, path.decode)
        and {path.prefill, path.decode} - {name} <= ready
    )


def has_joined(snapshot: Snapshot, name: str) -> bool:
    found = process(snapshot, name)
    if found.state != "ready" or not snapshot.pairs + snapshot.replicas:
        return False
    return all(path.state == "ready" and holds(path, snapshot) for path in paths_of(snapshot, name))


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
    """Only what concerns this one."""
    return msgspec.structs.replace(
        snapshot,
        members=tuple(m for m in snapshot.members if m.name == name),
        router=snapshot.router if name == ROUTER else None,
        pairs=tuple(p for p in snapshot.pairs if p in paths_of(snapshot, name)),
        replicas=tuple(p for p in snapshot.replicas if p in paths_of(snapshot, name)),
    )
