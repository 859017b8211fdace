"""The page stores of a cluster's hosts, as their agents see them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from pdctl.engines.channel import Message, StoreReport
from pdctl.handoff.store.shelves import StoreCounts
from pdctl.runtime.agent.lifecycle import shown
from pdctl.runtime.agent.supervisor import Supervised
from pdctl.topology.sharing import StorePlan


class StoreState(msgspec.Struct, frozen=True, kw_only=True):
    """One store; states as in MemberState."""

    name: str
    host: str
    state: str
    cause: str | None = None
    pid: int | None = None
    started_at: float | None = None
    restarts: int = 0
    data_port: int | None = None
    counts: StoreCounts = StoreCounts()


def planned_store(plan: StorePlan) -> StoreState:
    """A store of which nothing is known but its plan."""
    return StoreState(name=plan.name, host=plan.host, state="stopped", data_port=plan.data_port)


def states(
    plan: StorePlan | None,
    supervised: Mapping[str, Supervised],
    answer: Callable[[str], Message | None],
) -> tuple[StoreState, ...]:
    """One host's store, with the counts of its latest report; none where it has none."""
    if plan is None:
        return ()
    process, report = supervised[plan.name], answer(plan.name)
    found = msgspec.structs.replace(
        planned_store(plan),
        state=shown(process.state),
        cause=process.cause,
        pid=process.mark.pid if process.mark else None,
        started_at=process.started_at,
        restarts=process.restarts,
        counts=report.counts if isinstance(report, StoreReport) else StoreCounts(),
    )
    return (found,)
