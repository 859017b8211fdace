"""One host's agent: its supervised processes, their channel, and the picture of both.

Everything here runs in one event loop. `run` holds all tasks; whoever calls from outside (the
actor) only posts events and waits for versions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import anyio
import anyio.abc

from pdctl.engines.channel import (
    Attach,
    Failed,
    Members,
    PairStates,
    Ready,
    Report,
    RouterReport,
    StoreReady,
    StoreReport,
)
from pdctl.runtime.agent import changes, journal, picture, stores
from pdctl.runtime.agent.agreement import disagreements
from pdctl.runtime.agent.channel_server import POLL_S, Assigned, ChannelServer, Link
from pdctl.runtime.agent.journal import ROUTER, Entry, Journal
from pdctl.runtime.agent.lifecycle import SETTLED, Event, Limits
from pdctl.runtime.agent.orders import Orders
from pdctl.runtime.agent.outpost import FarHost, Outpost
from pdctl.runtime.agent.outposts import Outposts
from pdctl.runtime.agent.peers import stranger
from pdctl.runtime.agent.supervisor import Supervised
from pdctl.runtime.agent.view import Snapshot, View
from pdctl.runtime.cluster.state import ClusterRecord
from pdctl.topology.plan import ReplicaPlan

log = logging.getLogger("pdctl.agent")

STOP_MARGIN_S = 15.0
"""On top of the grace, for one process to be gone: SIGKILL, leftovers, and a slow kernel."""


class Agent:
    """Supervises the replicas of one host; where that is the router's host, the router and the
    other hosts' agents too.

    Implements `channel_server.Keeper`.

    Args:
        far: the other hosts, on the keeper; empty on any other agent.
    """

    def __init__(
        self,
        orders: Orders,
        limits: Limits | None = None,
        far: Mapping[str, FarHost] | None = None,
    ) -> None:
        self.orders = orders
        self.host = orders.host
        self.run_id = orders.record.run
        self.view = View()
        self.stopping = anyio.Event()
        """Set by whoever wants this agent to end."""
        self.leave = False
        """Whether its processes stay when it ends."""
        self.outposts = Outposts(
            (Outpost(host, orders.record, key=orders.key, changed=self.changed)
             for host in (far or {}).values()),
            {r.name: r.host for r in orders.record.plan.replicas},
        )  # fmt: skip
        self._limits = limits or Limits()
        self._plans = self._own_plans()
        self.supervised: dict[str, Supervised] = {}
        self._tasks: anyio.abc.TaskGroup | None = None
        self.links: dict[str, Link] = {}
        self._journalled: tuple[Entry, ...] = ()

    # -- life

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Adopts what runs, serves until `stopping` is set, then stops everything that it
        supervises, the router first; bounded."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            self._supervise(tasks)
            self._adopt(journal.read(self.orders.journal_path))
            server = ChannelServer(self.orders.socket_path, self)
            tasks.start_soon(server.run, started)
            for supervised in self.supervised.values():
                tasks.start_soon(supervised.run)
            for name in self.store_names:
                self.supervised[name].post(Event.START)
            tasks.start_soon(self.outposts.run)
            await self.stopping.wait()
            if not self.leave:
                await self.stop_all()
            tasks.cancel_scope.cancel()

    def _supervise(self, tasks: anyio.abc.TaskGroup) -> list[Supervised]:
        """What the record has here and is not supervised yet."""
        names = [*self.store_names, *self._plans]
        if self.orders.record.plan.router_host == self.host:
            names.append(ROUTER)
        new = [
            Supervised(name, self.orders.maker(name), self._limits, tasks, self.changed)
            for name in names
            if name not in self.supervised
        ]
        self.supervised.update((one.name, one) for one in new)
        return new

    def replace(self, going: Iterable[str]) -> None:
        """After a change of `orders`: drops what has gone, and supervises what has come."""
        for name in going:
            self.supervised.pop(name).retire()
        self._plans = self._own_plans()
        assert self._tasks is not None, "run() comes first"
        for new in self._supervise(self._tasks):
            self._tasks.start_soon(new.run)

    @property
    def store_names(self) -> tuple[str, ...]:
        """The page store of this host, where it has one."""
        return (self.orders.store.name,) if self.orders.store is not None else ()

    def _own_plans(self) -> dict[str, ReplicaPlan]:
        replicas = self.orders.record.plan.replicas
        return {replica.name: replica for replica in replicas if replica.host == self.host}

    def _adopt(self, found: Journal) -> None:
        for entry in found.entries:
            supervised = self.supervised.get(entry.name)
            if supervised is not None:
                supervised.drained = entry.drained
            if supervised is not None and entry.wanted:
                log.info("replica=%s taken over", entry.name)
                supervised.adopt(entry)
        self.changed()

    # -- what the actor asks

    # Each of these raises KeyError for a name that the cluster does not have, and AgentLost for
    # a replica whose host can't be reached.

    async def start(self, name: str) -> None:
        outpost = self.outposts.of(name)
        if outpost is not None:
            return await outpost.client.start(name)
        self.supervised[name].post(Event.START)

    async def restart(self, name: str) -> None:
        outpost = self.outposts.of(name)
        if outpost is not None:
            return await outpost.client.restart(name)
        self.supervised[name].post(Event.RESTART)

    async def drain(self, name: str, *, undo: bool) -> bool:
        """Returns whether it was draining before."""
        outpost = self.outposts.of(name)
        if outpost is not None:
            return await outpost.client.drain(name, undo=undo)
        return self.supervised[name].drain(undo=undo)

    async def stop(self, name: str) -> None:
        """Returns when nothing of it is left, or it is known to be stuck; bounded."""
        outpost = self.outposts.of(name)
        if outpost is not None:
            return await outpost.client.stop(name, self._limits.grace_s + STOP_MARGIN_S)
        supervised = self.supervised[name]
        supervised.post(Event.STOP)
        with anyio.move_on_after(self._limits.grace_s + STOP_MARGIN_S):
            await supervised.settle(SETTLED)

    async def change(self, record: ClusterRecord) -> None:
        """Takes a changed cluster: see `changes.change`."""
        await changes.change(self, record)

    async def stop_all(self) -> None:
        with anyio.CancelScope(shield=True):
            if ROUTER in self.supervised:
                await self.stop(ROUTER)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.outposts.shut_down)
                for name in (*self._plans, *self.store_names):
                    tasks.start_soon(self.stop, name)

    async def snapshot(self, *, fresh: bool) -> Snapshot:
        """The present picture; `fresh` asks every process for its counters first, at most
        `POLL_S`."""
        if fresh:
            await self._poll(self.links)
        return self.view.snapshot(self.host, self.run_id)

    async def changes(self, after: int, timeout_s: float) -> Snapshot:
        """The picture once its version is above `after`, or at the end of `timeout_s`."""
        with anyio.move_on_after(timeout_s):
            await self.view.changed(after)
        return self.view.snapshot(self.host, self.run_id)

    async def _poll(self, names: Iterable[str]) -> None:
        with anyio.move_on_after(POLL_S + 0.5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.outposts.refresh, POLL_S + 0.5)
                for name in list(names):
                    tasks.start_soon(self.links[name].poll)
        self.changed()

    # -- what the channel tells (Keeper)

    def admit(self, attach: Attach, uid: int | None, pid: int | None) -> Assigned | str:
        assigned = self._assigned(attach)
        if isinstance(assigned, str):
            return assigned
        mark = self.supervised[attach.name].mark
        return stranger(attach, mark, uid=uid, pid=pid) or assigned

    def _assigned(self, attach: Attach) -> Assigned | str:
        name, store = attach.name, self.orders.store
        if attach.kind == "router":
            here = name == ROUTER and ROUTER in self.supervised
            return self.orders.router_assignment() if here else f'host "{self.host}" has no router'
        if attach.kind == "store" and store is not None and name == store.name:
            return self.orders.store_assignment(store)
        plan = self._plans.get(name)
        if plan is None or attach.kind != "engine":
            what = "page store" if attach.kind == "store" else "replica"
            return f'host "{self.host}" has no {what} "{name}"'
        return self.orders.assignment(plan)

    def attached(self, name: str, link: Link) -> None:
        self.links[name] = link
        self.supervised[name].owned_by(link.peer[1])

    def detached(self, name: str, link: Link) -> None:
        if self.links.get(name) is link:
            del self.links[name]
            supervised = self.supervised[name]
            supervised.post(Event.LOST, incarnation=supervised.incarnation)

    def ready(self, name: str, ready: Ready | StoreReady) -> None:
        supervised = self.supervised[name]
        if isinstance(ready, StoreReady):
            supervised.post(Event.READY, incarnation=supervised.incarnation)
            return
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
        supervised = self.supervised[ROUTER]
        supervised.post(Event.READY, incarnation=supervised.incarnation)

    def members(self, seq: int = 0) -> Members:
        return self.view.message(seq)

    async def members_after(self, version: int) -> Members:
        await self.view.changed(version)
        return self.view.message()

    async def refreshed(self, seq: int) -> Members:
        await self._poll(name for name in self.links if name != ROUTER)
        return self.view.message(seq)

    # -- the picture

    def changed(self) -> None:
        """Something that others see has changed: the journal first, then the view."""
        entries = tuple(s.entry() for s in self.supervised.values() if s.incarnation)
        if entries != self._journalled and journal.keep(self.orders.journal_path, entries):
            self._journalled = entries
        members = [
            picture.member(plan, self.supervised[name], self._answer(name))
            for name, plan in self._plans.items()
        ]
        members += self.outposts.members()
        order = {plan.name: at for at, plan in enumerate(self.orders.record.plan.replicas)}
        self.view.update(
            tuple(sorted(members, key=lambda member: order.get(member.name, len(order)))),
            picture.router(self.supervised.get(ROUTER), self._answer(ROUTER)),
            self.outposts.states(),
            self.outposts.failures(),
            (*stores.states(self.orders.store, self.supervised, self._answer),
             *self.outposts.stores()),
        )  # fmt: skip

    def _answer(self, name: str) -> Report | RouterReport | StoreReport | None:
        link = self.links.get(name)
        return link.answer if link is not None else None
