"""`up` on a running cluster: what differs is applied, and undone where it does not work.

Removed replicas are drained and stopped; then the agents get the changed record; then what has
changed restarts, one after the other; then what is new starts; then the router, where it must.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import anyio
import msgspec

from pdctl.errors import ClusterError, LaunchError, PdctlError, UsageError
from pdctl.runtime.agent.journal import ROUTER
from pdctl.runtime.agent.view import Snapshot
from pdctl.runtime.change.draining import StillActive
from pdctl.runtime.change.rolling import SERVING, Rolling, process
from pdctl.runtime.checks.outcome import Validation
from pdctl.runtime.cluster.keeper import in_thread
from pdctl.runtime.cluster.placement import placement
from pdctl.runtime.cluster.state import ClusterRecord, StateDir
from pdctl.runtime.launch.events import LaunchEvent, Stage
from pdctl.topology.changes import UNSETTLED, Change, Changes, Declared, changes
from pdctl.trace import monotonic_s

STOP_S = 40.0
"""For an agent to end one replica: its grace, SIGKILL, and a slow kernel."""
UNDRAINED_S = 30.0
"""How long running requests may hold up the undoing of a change."""
ENDED = frozenset({"stopped", "failed"})
MOVED = frozenset({"http_port", "data_port", "side_port", "address"})
"""Where others reach a replica: nobody may be on the way when that changes."""


def difference(
    record: ClusterRecord, checked: Validation, snapshot: Snapshot, *, other_key: bool = False
) -> Changes:
    """What `up` has to do to a running cluster.

    Args:
        checked: a validation without errors, of the cluster's file as it is now.
        snapshot: of what runs; what has ended for good is to be started again.
        other_key: whether the API key has another value, which no file shows.
    """
    topology, plan, contract = checked.topology, checked.plan, checked.contract
    if topology is None or plan is None or contract is None:
        raise LaunchError(f"{record.topology_path} was not validated")
    ended = {m.name for m in snapshot.members if m.state in ENDED}
    found = changes(
        Declared(topology=record.topology, plan=record.plan, contract=record.contract),
        Declared(topology=topology, plan=plan, contract=contract),
        unsettled={*record.unsettled, *ended},
    )
    if not found.rebound and (other_key or ROUTER in record.unsettled):
        again = Change(field="its API key" if other_key else UNSETTLED, before="", after="")
        return msgspec.structs.replace(found, rebound=(again,))
    return found


def refuse(record: ClusterRecord, found: Changes) -> None:
    """Raises UsageError where a running cluster can't be changed so."""
    if found.refused:
        raise UsageError(
            f'cluster "{record.cluster}" runs, and can\'t take over '
            + "; ".join(change.text for change in found.refused),
            hint=f"`pdctl down {record.cluster}`, then `pdctl up` again",
        )


def changed_record(
    record: ClusterRecord, path: Path, checked: Validation, found: Changes
) -> ClusterRecord:
    """The record of the changed cluster; unsettled is what has yet to follow it."""
    router = (ROUTER,) if found.rebound else ()
    return msgspec.structs.replace(
        record,
        topology_path=str(path.resolve()),
        topology=checked.topology,
        plan=checked.plan,
        unsettled=(*found.restarted, *found.added, *router),
    )


class Changing:
    """One change in progress. The caller holds the lock, and cancels to interrupt.

    Args:
        work: of the cluster as it runs; not patient: what fails once is undone.
        after: as `changed_record` made it.
        api_key: the router's, from now on.
        drain_s: how long the running requests of each replica may take.
        wait_s: until everything must be ready.
    """

    def __init__(
        self,
        state: StateDir,
        work: Rolling,
        found: Changes,
        after: ClusterRecord,
        *,
        api_key: str | None,
        drain_s: float,
        wait_s: float,
    ) -> None:
        self.state = state
        self.work = work
        self.keeper = work.keeper
        self.found = found
        self.before = work.record
        self.record = after
        self.drain_s = drain_s
        self.until_s = monotonic_s() + wait_s
        self._stopped: list[str] = []
        self._started: list[str] = []
        self._restarted: list[str] = []
        self._closed: list[str] = []
        self._handed_over = False
        self.api_key = api_key
        self._old_api_key = state.read_api_key()

    async def run(self) -> ClusterRecord:
        """Applies everything.

        Raises:
            LaunchError: it did not work; the cluster is as it was.
            ClusterError: it did not work, and could not be undone whole.
        """
        self._first = await self.keeper.snapshot()
        try:
            await self._apply()
        except anyio.get_cancelled_exc_class():
            left = await self._undo()
            if left:
                raise self._half("interrupted", left) from None
            raise
        except PdctlError as error:
            left = await self._undo()
            if left:
                raise self._half(error.message, left) from error
            raise LaunchError(
                f"{error.message}; the cluster is as it was", hint=error.hint
            ) from error
        return self.record

    async def _apply(self) -> None:
        found = self.found
        for name in found.removed:
            await self._remove(name)
        for name, why in found.restarted.items():
            if any(change.field in MOVED for change in why):
                await self._close(name)
        self._handed_over = True
        await self._hand_over(self.record, self.api_key)
        for name in (*found.restarted, *((ROUTER,) if found.rebound else ())):
            self._restarted.append(name)
            await self.work.restart(name, drain_s=self._drain_s, wait_s=self._left_s)
            self._settle(name)
        blank = await self.keeper.snapshot()
        for name in found.added:
            self._started.append(name)
            await self.keeper.restart(name)
        for name in found.added:
            await self.work.rejoined(name, blank, self._left_s)
            self._settle(name)
        snapshot = await self.keeper.snapshot()
        if snapshot.router is not None and snapshot.router.url:
            self._write(url=snapshot.router.url)

    async def _remove(self, name: str) -> None:
        if process(self._first, name).state in SERVING:
            await self.work.drain(name, self._drain_s)
        self._stopped.append(name)
        await self._stop(name)

    async def _close(self, name: str) -> None:
        """No request goes to it any more: with the record it is looked for where it will be."""
        if process(self._first, name).state == "ready":
            await self.work.drain(name, self._drain_s)
            self._closed.append(name)

    async def _reopen(self, name: str) -> None:
        await self.keeper.drain(name, undo=True)

    async def _stop(self, name: str) -> None:
        await self.keeper.stop(name, STOP_S)
        found = process(await self.keeper.snapshot(), name)
        if found.state not in ENDED:
            raise ClusterError(f"{name} can't be stopped: it is {found.state}")
        self.work.emit(LaunchEvent(stage=Stage.STOP, subject=name, state="stopped"))

    async def _hand_over(self, record: ClusterRecord, api_key: str | None) -> None:
        self.work.record = record
        self.state.write(record)
        host = self.work.hosts[record.plan.router_host]
        place = await in_thread(placement, host, record, self.state)
        path = f"{place.state}/api_key"
        if api_key is None:
            await in_thread(host.remove, path)
        else:
            await in_thread(host.write, path, api_key.encode())
        await self.keeper.change(record)

    def _settle(self, name: str) -> None:
        self._write(unsettled=tuple(n for n in self.record.unsettled if n != name))

    def _write(self, **changes: object) -> None:
        self.record = msgspec.structs.replace(self.record, **changes)
        self.state.write(self.record)

    @property
    def _left_s(self) -> float:
        return max(0.0, self.until_s - monotonic_s())

    @property
    def _drain_s(self) -> float:
        return min(self.drain_s, self._left_s)

    # -- and back

    async def _undo(self) -> list[str]:
        """Shielded; every step is tried whatever became of the one before.

        Returns:
            What could not be undone, a sentence each.
        """
        self.work.emit(LaunchEvent(stage=Stage.ROLLBACK, subject="the change", state="started"))
        with anyio.CancelScope(shield=True):
            left = await self._each(self._started, self._stop)
            if self._handed_over:
                left += await self._each(("the agents",), self._hand_back)
            still = [name for name in self._closed if name not in self._restarted]
            left += await self._each(still, self._reopen)
            left += await self._each(self._restarted, self._restore)
            left += await self._each(self._stopped, self._revive)
        unsettled = tuple({*self._restarted, *self._stopped} if left else self.before.unsettled)
        self.state.write(msgspec.structs.replace(self.before, unsettled=unsettled))
        return left

    async def _each(
        self, names: Iterable[str], step: Callable[[str], Awaitable[None]]
    ) -> list[str]:
        left = []
        for name in names:
            try:
                await step(name)
            except PdctlError as error:
                left.append(error.message)
        return left

    async def _hand_back(self, _: str) -> None:
        await self._hand_over(self.before, self._old_api_key)

    async def _restore(self, name: str) -> None:
        """As it was started before; waited for where it served before."""
        if process(self._first, name).state not in SERVING:
            return await self.keeper.restart(name)
        wait_s = max(self._left_s, UNDRAINED_S)
        try:
            await self.work.restart(name, drain_s=UNDRAINED_S, wait_s=wait_s)
        except StillActive:
            await self.work.restart(name, drain_s=None, wait_s=wait_s)

    async def _revive(self, name: str) -> None:
        if process(self._first, name).state not in SERVING:
            return
        await self.keeper.drain(name, undo=process(self._first, name).state == "ready")
        ended = await self.keeper.snapshot()
        await self.keeper.restart(name)
        await self.work.rejoined(name, ended, max(self._left_s, UNDRAINED_S))

    def _half(self, message: str, left: list[str]) -> ClusterError:
        return ClusterError(
            f"{message}; it could not be undone whole: {'; '.join(left)}",
            hint=f"`pdctl ps {self.before.cluster}` shows what runs, `pdctl up` tries again",
        )
