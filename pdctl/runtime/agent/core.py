"""One host's agent: its supervised processes, their channel, and the picture of both.

Everything here runs in one event loop. `run` holds all tasks; whoever calls from outside (the
actor) only posts events and waits for versions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable

import anyio
import anyio.abc
import msgspec

from pdctl.engines.channel import (
    Assignment,
    Attach,
    Failed,
    Members,
    MemberState,
    PairStates,
    Ready,
    Report,
    RouterAssignment,
    RouterReport,
)
from pdctl.errors import HostError
from pdctl.runtime.agent import journal
from pdctl.runtime.agent.agreement import disagreements
from pdctl.runtime.agent.channel_server import POLL_S, ChannelServer, Link
from pdctl.runtime.agent.journal import ROUTER, Entry, Journal
from pdctl.runtime.agent.lifecycle import SETTLED, Event, Limits, shown
from pdctl.runtime.agent.orders import Orders
from pdctl.runtime.agent.supervisor import Supervised
from pdctl.runtime.agent.view import RouterState, Snapshot, View
from pdctl.topology.plan import ReplicaPlan

log = logging.getLogger("pdctl.agent")

STOP_MARGIN_S = 15.0
"""On top of the grace, for one process to be gone: SIGKILL, leftovers, and a slow kernel."""


class Agent:
    """Supervises the replicas of one host, and the router where that is this host.

    Implements `channel_server.Keeper`.
    """

    def __init__(self, orders: Orders, limits: Limits | None = None) -> None:
        self.orders = orders
        self.host = orders.host
        self.run_id = orders.record.run
        self.view = View()
        self.stopping = anyio.Event()
        """Set by whoever wants this agent to end."""
        self.leave = False
        """Whether its processes stay when it ends."""
        self._limits = limits or Limits()
        self._plans = {r.name: r for r in orders.record.plan.replicas if r.host == self.host}
        self._supervised: dict[str, Supervised] = {}
        self._links: dict[str, Link] = {}
        self._journalled: tuple[Entry, ...] = ()

    # -- life

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Adopts what runs, serves until `stopping` is set, then stops everything that it
        supervises, the router first; bounded."""
        async with anyio.create_task_group() as tasks:
            self._supervise(tasks)
            self._adopt(journal.read(self.orders.journal_path))
            server = ChannelServer(self.orders.socket_path, self)
            tasks.start_soon(server.run, started)
            for supervised in self._supervised.values():
                tasks.start_soon(supervised.run)
            await self.stopping.wait()
            if not self.leave:
                await self.stop_all()
            tasks.cancel_scope.cancel()

    def _supervise(self, tasks: anyio.abc.TaskGroup) -> None:
        names = list(self._plans)
        if self.orders.record.plan.router_host == self.host:
            names.append(ROUTER)
        for name in names:
            self._supervised[name] = Supervised(
                name, self.orders.maker(name), self._limits, tasks, self._changed
            )

    def _adopt(self, found: Journal) -> None:
        for entry in found.entries:
            supervised = self._supervised.get(entry.name)
            if supervised is not None:
                supervised.drained = entry.drained
            if supervised is not None and entry.wanted:
                log.info("replica=%s taken over", entry.name)
                supervised.adopt(entry)
        self._changed()

    # -- what the actor asks

    def start(self, name: str) -> None:
        """Raises KeyError for a name that this host does not have."""
        self._supervised[name].post(Event.START)

    def restart(self, name: str) -> None:
        self._supervised[name].post(Event.RESTART)

    def drain(self, name: str, *, undo: bool) -> bool:
        """Returns whether it was draining before."""
        return self._supervised[name].drain(undo=undo)

    async def stop(self, name: str) -> None:
        """Returns when nothing of it is left, or it is known to be stuck; bounded."""
        supervised = self._supervised[name]
        supervised.post(Event.STOP)
        with anyio.move_on_after(self._limits.grace_s + STOP_MARGIN_S):
            await supervised.settle(SETTLED)

    async def stop_all(self) -> None:
        with anyio.CancelScope(shield=True):
            if ROUTER in self._supervised:
                await self.stop(ROUTER)
            async with anyio.create_task_group() as tasks:
                for name in self._plans:
                    tasks.start_soon(self.stop, name)

    async def snapshot(self, *, fresh: bool) -> Snapshot:
        """The present picture; `fresh` asks every process for its counters first, at most
        `POLL_S`."""
        if fresh:
            await self._poll(self._links)
        return self.view.snapshot(self.host, self.run_id)

    async def changes(self, after: int, timeout_s: float) -> Snapshot:
        """The picture once its version is above `after`, or at the end of `timeout_s`."""
        with anyio.move_on_after(timeout_s):
            await self.view.changed(after)
        return self.view.snapshot(self.host, self.run_id)

    async def _poll(self, names: Iterable[str]) -> None:
        with anyio.move_on_after(POLL_S + 0.5):
            async with anyio.create_task_group() as tasks:
                for name in list(names):
                    tasks.start_soon(self._links[name].poll)
        self._changed()

    # -- what the channel tells (Keeper)

    def admit(self, attach: Attach, uid: int | None, pid: int | None) -> Assignment | str:
        plan = self._plans.get(attach.name)
        if plan is None:
            return f'host "{self.host}" has no replica "{attach.name}"'
        return self._strange(attach, uid, pid) or self.orders.assignment(plan)

    def admit_router(
        self, attach: Attach, uid: int | None, pid: int | None
    ) -> RouterAssignment | str:
        if attach.name != ROUTER or ROUTER not in self._supervised:
            return f'host "{self.host}" has no router'
        return self._strange(attach, uid, pid) or self.orders.router_assignment()

    def _strange(self, attach: Attach, uid: int | None, pid: int | None) -> str | None:
        """Why this peer is not what it says: another user's, or not of the process group that
        was started under that name (an earlier one that is still dying, say)."""
        if uid is not None and uid != os.getuid():
            return "another user's process"
        mark = self._supervised[attach.name].mark
        try:
            session = os.getsid(pid or attach.pid)
        except (ProcessLookupError, PermissionError):
            return "its process can't be seen"
        if mark is None or session != mark.pid:
            return f"process {attach.pid} is not the one that runs as {attach.name}"
        return None

    def attached(self, name: str, link: Link) -> None:
        self._links[name] = link

    def detached(self, name: str, link: Link) -> None:
        if self._links.get(name) is link:
            del self._links[name]
            supervised = self._supervised[name]
            supervised.post(Event.LOST, incarnation=supervised.incarnation)

    def ready(self, name: str, ready: Ready) -> None:
        supervised = self._supervised[name]
        found = disagreements(ready, self.orders.record.contract, self._plans[name])
        if found:
            cause = "; ".join(found)
            supervised.post(Event.DIFFERS, cause, incarnation=supervised.incarnation)
            return
        supervised.ready = ready
        supervised.post(Event.READY, incarnation=supervised.incarnation)

    def failed(self, failure: Failed) -> None:
        self.view.failed(failure)

    def announced(self, states: PairStates) -> None:
        self.view.announce(states)
        supervised = self._supervised[ROUTER]
        supervised.post(Event.READY, incarnation=supervised.incarnation)

    def members(self, seq: int = 0) -> Members:
        return self.view.message(seq)

    async def members_after(self, version: int) -> Members:
        await self.view.changed(version)
        return self.view.message()

    async def refreshed(self, seq: int) -> Members:
        await self._poll(name for name in self._links if name != ROUTER)
        return self.view.message(seq)

    # -- the picture

    def _changed(self) -> None:
        """Something that others see has changed: the journal first, then the view."""
        entries = tuple(s.entry() for s in self._supervised.values() if s.incarnation)
        if entries != self._journalled:
            self._write_down(entries)
        members = tuple(self._member(plan) for plan in self._plans.values())
        self.view.update(members, self._router())

    def _write_down(self, entries: tuple[Entry, ...]) -> None:
        """A full disk must not end the agent: without a journal, the run's mark is left."""
        try:
            journal.write(self.orders.journal_path, Journal(entries=entries))
            self._journalled = entries
        except HostError as error:
            log.error("%s", error.message)

    def _member(self, plan: ReplicaPlan) -> MemberState:
        supervised = self._supervised[plan.name]
        ready, link = supervised.ready, self._links.get(plan.name)
        report = link.answer if link is not None else None
        member = MemberState(
            name=plan.name,
            engine=plan.engine,
            role=plan.role,
            host=plan.host,
            state=shown(supervised.state, drained=supervised.drained),
            cause=supervised.cause,
            pid=supervised.mark.pid if supervised.mark else None,
            started_at=supervised.started_at,
            restarts=supervised.restarts,
            http_host=plan.http_host,
            http_port=plan.http_port,
            data_host=plan.data_host,
            data_port=plan.data_port,
            incarnation=supervised.incarnation,
            engine_version=ready.engine_version if ready else None,
            compute_dtype=plan.compute_dtype,
        )
        if isinstance(report, Report):
            return msgspec.structs.replace(member, counters=report.counters)
        return member

    def _router(self) -> RouterState | None:
        supervised = self._supervised.get(ROUTER)
        if supervised is None:
            return None
        link = self._links.get(ROUTER)
        report = link.answer if link is not None else None
        counts = report if isinstance(report, RouterReport) else None
        return RouterState(
            state=shown(supervised.state, drained=supervised.drained),
            cause=supervised.cause,
            pid=supervised.mark.pid if supervised.mark else None,
            started_at=supervised.started_at,
            restarts=supervised.restarts,
            requests_active=counts.requests_active if counts else 0,
            requests_total=counts.requests_total if counts else 0,
            requests_failed=counts.requests_failed if counts else 0,
            active=counts.active if counts else {},
            draining=counts.draining if counts else (),
        )
