"""One replica, or the router, as others see it. Pure."""

from __future__ import annotations

import msgspec

from pdctl.engines.channel import MemberState, Report, RouterReport, StoreReport
from pdctl.handoff.counters import OF_A_HANDOFF, Counters
from pdctl.runtime.agent.lifecycle import shown
from pdctl.runtime.agent.supervisor import Supervised
from pdctl.runtime.agent.view import RouterState
from pdctl.topology.plan import ReplicaPlan


def planned(plan: ReplicaPlan) -> MemberState:
    """A replica of which nothing is known but its plan. One with its engine's own handoff has
    not said yet what it can't tell."""
    return MemberState(
        name=plan.name,
        engine=plan.engine,
        role=plan.role,
        host=plan.host,
        state="stopped",
        http_host=plan.http_host,
        http_port=plan.http_port,
        data_host=plan.data_host,
        data_port=plan.sender_port,
        compute_dtype=plan.compute_dtype,
        counters=Counters(untold=OF_A_HANDOFF) if plan.native else Counters(),
    )


def member(
    plan: ReplicaPlan, supervised: Supervised, report: Report | RouterReport | StoreReport | None
) -> MemberState:
    """A replica, with the counters of its latest report."""
    ready = supervised.ready
    found = msgspec.structs.replace(
        planned(plan),
        state=shown(supervised.state, drained=supervised.drained),
        cause=supervised.cause,
        pid=supervised.mark.pid if supervised.mark else None,
        started_at=supervised.started_at,
        restarts=supervised.restarts,
        incarnation=supervised.incarnation,
        engine_version=ready.engine_version if ready else None,
    )
    if isinstance(report, Report):
        return msgspec.structs.replace(found, counters=report.counters)
    return found


def router(
    supervised: Supervised | None, report: Report | RouterReport | StoreReport | None
) -> RouterState | None:
    """The router; None where that is another host's."""
    if supervised is None:
        return None
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
