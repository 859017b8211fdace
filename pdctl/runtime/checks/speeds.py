"""How fast the pairs' links are, also beside a running cluster's own ports."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdctl.runtime.checks import links, network
from pdctl.runtime.checks.ground import Ground
from pdctl.topology.plan import Plan

MEASURE_BYTES = 64 << 20
"""Per pair; or as much as comes within two seconds."""
PORTS_BESIDE = 64
"""How far from a data port that is taken by its own cluster another one is looked for."""


def speeds(ground: Ground, plan: Plan) -> list[links.Tried]:
    """Dials and measures every pair of `plan`, one after another; several pairs between the
    same two hosts are measured once. Pairs that never listen over TCP are left out."""
    listening = network.listening(ground)
    seen: dict[tuple[str, str, str], links.Tried] = {}
    found = []
    for trial in links.trials_of(plan):
        if {trial.sender.host, trial.receiver.host} & set(ground.lost):
            continue
        way = (trial.sender.host, trial.sender.data_host, trial.receiver.host)
        if way not in seen:
            near = beside(ground, trial, plan, listening)
            seen[way] = links.try_link(ground, near, measure_bytes=MEASURE_BYTES)
        found.append(links.Tried(trial=trial, dialled=seen[way].dialled))
    return found


def measured(ground: Ground, trial: links.Trial, tried: links.Tried | None) -> links.Tried | None:
    """With the link's speed where it works. What is closed beside a running sender's own port
    counts only where that one is closed too."""
    if tried is None:
        return None
    if tried.dialled.error is None:
        return links.try_link(ground, trial, measure_bytes=MEASURE_BYTES)
    if trial.port == trial.sender.sender_port:
        return tried
    return links.try_own_port(ground, trial)


def beside(
    ground: Ground, trial: links.Trial, plan: Plan, listening: Mapping[str, frozenset[int]]
) -> links.Trial:
    """At a free port near the data port, where the running cluster has that one itself."""
    if not links.is_own(ground, trial):
        return trial
    host = trial.sender.host
    planned = {r.sender_port for r in plan.replicas} | {r.http_port for r in plan.replicas}
    taken = listening.get(host, frozenset()) | planned | ground.own_ports(host)
    last = min(trial.port + PORTS_BESIDE, 65535)
    free = [port for port in range(trial.port + 1, last + 1) if port not in taken]
    return msgspec.structs.replace(trial, port=free[0]) if free else trial
