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

from pdctl.engines.registry import spec_for
from pdctl.errors import PdctlError
from pdctl.runtime.checks import machines
from pdctl.runtime.checks.ground import Ground
from pdctl.runtime.checks.links import check_links
from pdctl.runtime.checks.models import Models
from pdctl.runtime.checks.room import check_room
from pdctl.runtime.checks.routes import check_routes
from pdctl.runtime.hosts.interface import RuntimeHost
from pdctl.runtime.hosts.reach import Hosts
from pdctl.runtime.outcome import ModelFacts, Silent, Validation, Watcher
from pdctl.runtime.ports import wanted_bindings
from pdctl.topology import limits, rules
from pdctl.topology.contract import Contract
from pdctl.topology.diagnostics import Diagnostic, Report, Severity
from pdctl.topology.differences import explain_all
from pdctl.topology.load import Draft, read
from pdctl.topology.model import Host
from pdctl.topology.plan import Plan, derive

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
    own_ports: frozenset[int] = frozenset(),
    kept: Plan | None = None,
) -> Validation:
    """Validates a topology file; never raises for what it finds. Every connection that it
    makes is closed when it returns.

    Args:
        offline: the file alone; no host is touched, and no checkpoint is read.
        environ: the launching process's environment; its own by default.
        reach: how to get to the hosts.
        own_ports: ports that this very cluster listens on now, which are no clash.
        kept: this very cluster's plan, where it runs: what stays keeps its ports.
    """
    draft = read(path)
    found = check_file(draft, os.environ if environ is None else environ)
    if draft.topology is None:
        return Validation(report=Report.of(found))
    if offline:
        report = Report.of(found)
        topology = draft.topology if report.valid else None
        plan = derive(topology, kept=kept) if topology else None
        return Validation(report=report, topology=topology, plan=plan)
    with reach(draft.topology.hosts) as hosts:
        ground = Ground(draft.topology, hosts, watcher or Silent(), own_ports=own_ports, kept=kept)
        return examine(ground, found).validation


def check_file(draft: Draft, environ: Mapping[str, str]) -> list[Diagnostic]:
    """Everything that the file alone shows: fields, rules, engine options, environment."""
    found = list(draft.diagnostics)
    topology = draft.topology
    if topology is None:
        return found
    found += rules.check(topology, partial=draft.partial)
    for index, replica in enumerate(topology.replicas):
        if replica.engine in limits.SERVED_ENGINES:
            found += [_placed(d, index) for d in spec_for(replica.engine).check(replica)]
    return found + rules.check_environment(topology, environ)


def _placed(diagnostic: Diagnostic, index: int) -> Diagnostic:
    """An engine names fields of its replica; the file's reader wants the whole place."""
    field = diagnostic.field
    if field is None or field.startswith("replicas["):
        return diagnostic
    return msgspec.structs.replace(diagnostic, field=f"replicas[{index}].{field}")


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """A validation, and what was seen on the way to it."""

    validation: Validation
    seen: dict[str, machines.Seen] = {}
    """Of every host that was reached."""
    plan: Plan | None = None
    """Also of a cluster that is not valid, as far as it could be derived."""


def examine(ground: Ground, found: list[Diagnostic], *, links: bool = True) -> Examined:
    """Everything that touches hosts.

    Args:
        found: what the file showed; with an error, only directories of this machine are looked at.
        links: whether pairs on two hosts are dialled.
    """
    topology, models = ground.topology, Models(ground)
    broken = _has_error(found)
    seen = {} if broken else _see(ground)
    problems = [*machines.judge(ground, seen), *models.read(near_only=broken)]
    plan: Plan | None = None
    contract: Contract | None = None
    if not broken:
        problems += models.study()
        contract = models.contract()
        problems += explain_all(models.sides())
        if contract is not None:
            problems += rules.check_buffer(topology, contract)
        try:
            plan = derive(topology, contract, busy=_busy(ground), kept=ground.kept)
        except PdctlError as error:
            problems.append(Diagnostic(code="host.ports", summary=error.message, hint=error.hint))
        else:
            problems += _network(ground, plan, links=links)
            problems += check_room(plan, models.known, seen, kept=ground.kept)
    report = Report.of([*found, *ground.losses(), *problems])
    valid = report.valid
    validation = Validation(
        report=report,
        topology=topology if valid else None,
        plan=plan if valid else None,
        contract=contract if valid else None,
        models=models.known,
    )
    return Examined(validation=validation, seen=seen, plan=plan)


def _see(ground: Ground) -> dict[str, machines.Seen]:
    declared = ground.topology.hosts
    return ground.ask(
        "checking versions, disk and clock", lambda host: machines.see(host, declared[host.name])
    )


def _busy(ground: Ground) -> dict[str, frozenset[int]]:
    ports = ground.ask(None, lambda host: frozenset(one.port for one in host.listeners()))
    return {name: found - ground.own_ports for name, found in ports.items()}


def _network(ground: Ground, plan: Plan, *, links: bool) -> list[Diagnostic]:
    """Ports of every host, then what needs two hosts."""
    answers = ground.ask(
        "checking ports",
        lambda host: host.survey.bindings(
            wanted_bindings(plan, host.name, own_ports=ground.own_ports)
        ),
    )
    found = [ground.at_host(d, name) for name, problems in answers.items() for d in problems]
    unfit = frozenset(d.replica for d in found if d.replica and _is_data_port(d))
    if links:
        found += check_links(ground, plan, unfit=unfit)
    return found + check_routes(ground)


def _is_data_port(diagnostic: Diagnostic) -> bool:
    return (diagnostic.field or "").endswith(".data_port")


def _has_error(found: Iterable[Diagnostic]) -> bool:
    return any(d.severity is Severity.ERROR for d in found)
