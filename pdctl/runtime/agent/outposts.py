"""All other hosts of a cluster, as the keeper holds them; none on any other agent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import anyio

from pdctl.engines.channel import Failed, MemberState
from pdctl.runtime.agent.outpost import Outpost
from pdctl.runtime.agent.stores import StoreState
from pdctl.runtime.agent.view import HostState
from pdctl.runtime.cluster.state import ClusterRecord


class Outposts:
    """Asks all of them at once, and each replica's own.

    Args:
        replicas: replica → its host, of every replica that does not run here.
    """

    def __init__(self, outposts: Iterable[Outpost] = (), replicas: dict[str, str] | None = None):
        self._outposts = {outpost.name: outpost for outpost in outposts}
        self._replicas = dict(replicas or {})

    def __iter__(self) -> Iterator[Outpost]:
        return iter(self._outposts.values())

    def of(self, replica: str) -> Outpost | None:
        """Where a replica runs; None where that is here, or nowhere."""
        return self._outposts.get(self._replicas.get(replica, ""))

    def change(self, record: ClusterRecord) -> None:
        """Takes a changed cluster; what its agents do with it is theirs."""
        self._replicas = {replica.name: replica.host for replica in record.plan.replicas}
        for outpost in self:
            outpost.change(record)

    def members(self) -> tuple[MemberState, ...]:
        return tuple(member for outpost in self for member in outpost.members())

    def states(self) -> tuple[HostState, ...]:
        return tuple(outpost.state() for outpost in self)

    def failures(self) -> tuple[Failed, ...]:
        return tuple(failure for outpost in self for failure in outpost.failures)

    def stores(self) -> tuple[StoreState, ...]:
        return tuple(store for outpost in self for store in outpost.stores())

    async def run(self) -> None:
        """Ends by cancellation only."""
        async with anyio.create_task_group() as tasks:
            for outpost in self:
                tasks.start_soon(outpost.run)

    async def refresh(self, within_s: float) -> None:
        """Counters of this moment from whoever answers in time."""
        with anyio.move_on_after(within_s):
            async with anyio.create_task_group() as tasks:
                for outpost in self:
                    tasks.start_soon(outpost.refresh)

    async def shut_down(self) -> None:
        """Ends every agent there and all that it runs, as far as it is reached; bounded."""
        async with anyio.create_task_group() as tasks:
            for outpost in self:
                tasks.start_soon(outpost.shut_down)
