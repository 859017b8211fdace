"""What `pdctl ps` shows: from the agent where it answers, else from its journal. Data only."""

from __future__ import annotations

from typing import Any

import msgspec

from pdctl.engines.channel import MemberState, PairState
from pdctl.errors import ClusterError, HostError, PdctlError
from pdctl.handoff.counters import shown_counters, shown_pair
from pdctl.runtime.agent import journal
from pdctl.runtime.agent.journal import ROUTER, Entry
from pdctl.runtime.agent.stores import StoreState
from pdctl.runtime.agent.view import RouterState, Snapshot
from pdctl.runtime.cluster.keeper import keeper_of
from pdctl.runtime.cluster.state import ClusterRecord, StateDir
from pdctl.runtime.machine import process

UNKNOWN: dict[str, Any] = {"state": "unknown", "pid": None, "uptime_s": None, "restarts": None}
"""Of a process on another host, while nobody can be asked."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`ps --json`, whole."""

    cluster: str
    phase: str
    """ "starting" | "running" | "stopping" | "agent lost"."""
    url: str | None
    replicas: list[dict[str, Any]]
    router: dict[str, Any]
    pairs: list[dict[str, Any]]
    hosts: list[dict[str, Any]] = []
    """Every host but the router's."""
    stores: list[dict[str, Any]] = []
    """Page stores, where prefix KV is shared."""
    problem: str | None = None
    """Why this is not the whole picture; None when it is."""
    hint: str | None = None
    """What to do about that."""


async def status(state: StateDir, record: ClusterRecord) -> Status:
    """Counters of this moment. A dead agent is said, and its journal shown instead."""
    try:
        async with keeper_of(state, record) as keeper:
            await keeper.check()
            return from_snapshot(record, await keeper.snapshot(fresh=True))
    except (ClusterError, HostError) as error:
        found = journal.read(state.journal(record.plan.router_host))
        return from_journal(record, found, error)


def from_snapshot(record: ClusterRecord, snapshot: Snapshot) -> Status:
    members = {member.name: member for member in snapshot.members}
    router = snapshot.router or RouterState(state="stopped")
    return Status(
        cluster=record.cluster,
        phase=record.phase,
        url=router.url or record.url,
        replicas=[_replica(m, snapshot.replicas, router.active) for m in snapshot.members],
        router=_router(router),
        pairs=[
            {
                **msgspec.to_builtins(pair),
                **shown_pair(
                    *(
                        None if end is None else (end.name, end.counters)
                        for end in (members.get(pair.prefill), members.get(pair.decode))
                    )
                ),
            }
            for pair in snapshot.pairs
        ],
        hosts=[msgspec.to_builtins(host) for host in snapshot.hosts],
        stores=[_store(store) for store in snapshot.stores],
    )


def from_journal(record: ClusterRecord, found: journal.Journal, problem: PdctlError) -> Status:
    """Without an agent: which of its processes on this machine still live.

    Args:
        found: the keeper's; empty where it runs on another host.
        problem: why the keeper can't be asked.
    """
    here = record.topology.hosts[record.plan.router_host].ssh is None
    keeper = record.plan.router_host
    replicas = []
    for plan in record.plan.replicas:
        entry = found.entry(plan.name)
        replicas.append(
            {
                "name": plan.name,
                "engine": plan.engine.value,
                "role": plan.role.value,
                "host": plan.host,
                **(_process(entry) if here and plan.host == keeper else UNKNOWN),
                "compute_dtype": plan.compute_dtype.value,
            }
        )
    return Status(
        cluster=record.cluster,
        phase="agent lost" if record.phase == "running" else record.phase,
        url=record.url,
        replicas=replicas,
        router=_process(found.entry(ROUTER)) if here else UNKNOWN,
        pairs=[
            {
                "prefill": pair.prefill,
                "decode": pair.decode,
                "transport": pair.transport.value,
                "transport_reason": pair.reason,
                "state": "unknown",
                "cause": problem.message,
            }
            for pair in record.plan.pairs
        ],
        stores=[
            {
                "name": store.name,
                "host": store.host,
                **(_process(found.entry(store.name)) if here and store.host == keeper else UNKNOWN),
            }
            for store in record.plan.stores
        ],
        problem=problem.message,
        hint=problem.hint or f"`pdctl down {record.cluster}` ends what is left",
    )


def _replica(
    member: MemberState, canaries: tuple[PairState, ...], routed: dict[str, int]
) -> dict[str, Any]:
    canary = next((c for c in canaries if c.decode == member.name), None)
    return {
        "name": member.name,
        "engine": member.engine.value,
        "role": member.role.value,
        "host": member.host,
        "state": member.state,
        "cause": member.cause or (canary.cause if canary else None),
        "canary": canary.state if canary else None,
        "pid": member.pid,
        "uptime_s": _rounded(journal.uptime_s(member.started_at)),
        "restarts": member.restarts,
        "http_port": member.http_port,
        "engine_version": member.engine_version,
        "compute_dtype": member.compute_dtype.value if member.compute_dtype else None,
        "routed_active": routed.get(member.name, 0),
        **shown_counters(member.counters),
    }


def _store(store: StoreState) -> dict[str, Any]:
    return {
        "name": store.name,
        "host": store.host,
        "state": store.state,
        "cause": store.cause,
        "pid": store.pid,
        "uptime_s": _rounded(journal.uptime_s(store.started_at)),
        "restarts": store.restarts,
        "data_port": store.data_port,
        **msgspec.to_builtins(store.counts),
    }


def _router(router: RouterState) -> dict[str, Any]:
    return {
        "state": router.state,
        "cause": router.cause,
        "pid": router.pid,
        "uptime_s": _rounded(journal.uptime_s(router.started_at)),
        "restarts": router.restarts,
        "url": router.url,
        "requests_active": router.requests_active,
        "requests_total": router.requests_total,
        "requests_failed": router.requests_failed,
    }


def _process(entry: Entry | None) -> dict[str, Any]:
    mark = entry.mark if entry else None
    alive = mark is not None and process.is_alive(mark)
    return {
        "state": "unsupervised" if alive else "gone",
        "pid": mark.pid if mark and alive else None,
        "uptime_s": _rounded(journal.uptime_s(entry.started_at)) if entry and alive else None,
        "restarts": entry.restarts if entry else 0,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
