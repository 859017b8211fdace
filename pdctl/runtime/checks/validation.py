"""Everything that can be known before launch: one function for `validate`, `plan` and `up`.

Order: the file → hosts and model directories → environments and fingerprints → contracts →
ports, links, routes → memory. A broken file stops it before any process is started; otherwise
every step adds what it finds. Hosts are asked all at once, and one that can't be reached costs
one diagnostic: everything else is still checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

import msgspec

from pdctl.engines.engine_config import check_shared
from pdctl.engines.registry import spec_for
from pdctl.errors import PdctlError
from pdctl.runtime.checks import machines, network
from pdctl.runtime.checks.ground import Ground
from pdctl.runtime.checks.links import check_links
from pdctl.runtime.checks.models import Models
from pdctl.runtime.checks.outcome import ModelFacts, Silent, Validation, Watcher
from pdctl.runtime.checks.room import check_room
from pdctl.runtime.checks.routes import check_routes
from pdctl.runtime.checks.stores import check_stores
from pdctl.runtime.hosts.interface import RuntimeHost
from pdctl.runtime.hosts.reach import Hosts
from pdctl.topology import rules
from pdctl.topology.contract import Contract
from pdctl.topology.diagnostics import Diagnostic, Report, Severity
from pdctl.topology.differences import explain_all
from pdctl.topology.load import Draft, read
from pdctl.topology.model import Host, Role
from pdctl.topology.plan import Plan, derive
from pdctl.topology.sharing import sharing_hosts

__all__ = ["ModelFacts", "Reach", "Silent", "Validation", "Watcher", "check_file", "validate"]

Reach = Callable[[Mapping[str, Host]], AbstractContextManager[Mapping[str, RuntimeHost]]]
"""Declared hosts → the ways to them, for the length of one `with`."""


def validate(
    path: str | os.PathLike[str],
    *,
    offline: bool = False,
    environ: Mapping[str, str] | None = None,
    reach: Reach = Hosts,
    watcher: Watcher | None = None,
    kept: Plan | None = None,
) -> Validation:
    """Validates a topology file; never raises for what it finds. Every connection that it
    makes is closed when it returns.

    Args:
        offline: the file alone; no host is touched, and no checkpoint is read. What the
            environment lacks for a launch is a warning then.
        environ: the launching process's environment; its own by default.
        reach: how to get to the hosts.
        kept: this very cluster's plan, where it runs: what stays keeps its ports, and none of
            them is a clash.
    """
    draft = read(path)
    found = check_file(draft)
    if draft.topology is None:
        return Validation(report=Report.of(found))
    unset = Severity.WARNING if offline else Severity.ERROR
    found += rules.check_environment(
        draft.topology, os.environ if environ is None else environ, unset
    )
    if offline:
        report = Report.of(found)
        topology = draft.topology if report.valid else None
        plan = derive(topology, kept=kept) if topology else None
        return Validation(report=report, topology=topology, plan=plan)
    with reach(draft.topology.hosts) as hosts:
        ground = Ground(draft.topology, hosts, watcher or Silent(), kept=kept)
        return examine(ground, found)


def check_file(draft: Draft) -> list[Diagnostic]:
    """Everything that the file alone shows: fields, rules, engine options."""
    found = list(draft.diagnostics)
    topology = draft.topology
    if topology is None:
        return found
    found += rules.check(topology, partial=draft.partial)
    sharing = sharing_hosts(topology)
    for index, replica in enumerate(topology.replicas):
        spec = spec_for(replica.engine)
        told = spec.check(replica)
        if replica.role is Role.BOTH and replica.host in sharing:
            told += check_shared(replica, spec.not_with_sharing)
        found += [_placed(d, index) for d in told]
    return found


def _placed(diagnostic: Diagnostic, index: int) -> Diagnostic:
    """An engine names fields of its replica; the file's reader wants the whole place."""
    field = diagnostic.field
    if field is None or field.startswith("replicas["):
        return diagnostic
    return msgspec.structs.replace(diagnostic, field=f"replicas[{index}].{field}")


def examine(ground: Ground, found: list[Diagnostic]) -> Validation:
    """Everything that touches hosts.

    Args:
        found: what the file showed; with an error, only directories of this machine are looked at.
    """
    topology, models = ground.topology, Models(ground)
    broken = _has_error(found)
    seen = {} if broken else machines.see_all(ground)
    problems = [*machines.judge(ground, seen), *models.read(near_only=broken)]
    plan: Plan | None = None
    contract: Contract | None = None
    if not broken:
        problems += [*models.probe(), *models.fingerprint()]
        contract = models.contract()
        problems += explain_all(models.sides())
        if contract is not None:
            problems += rules.check_buffer(topology, contract)
        try:
            busy = network.busy(ground, network.listening(ground))
            plan = derive(topology, contract, busy=busy, kept=ground.kept, no_nixl=models.no_nixl())
        except PdctlError as error:
            problems.append(Diagnostic(code="host.ports", summary=error.message, hint=error.hint))
        else:
            problems += _network(ground, plan)
            problems += check_room(plan, models.known, seen, kept=ground.kept)
    report = Report.of([*found, *ground.losses(), *problems])
    valid = report.valid
    return Validation(
        report=report,
        topology=topology if valid else None,
        plan=plan if valid else None,
        contract=contract if valid else None,
        models=models.known,
        homes={name: one.facts.state_home for name, one in seen.items()},
    )


def _network(ground: Ground, plan: Plan) -> list[Diagnostic]:
    """Ports of every host, then what needs two hosts."""
    found = network.check_ports(ground, plan)
    found += check_links(ground, plan, unfit=network.mute_senders(found))
    found += check_stores(ground, plan)
    return found + check_routes(ground)


def _has_error(found: Iterable[Diagnostic]) -> bool:
    return any(d.severity is Severity.ERROR for d in found)
