"""Which ports every host has free, and whether it can listen where a plan says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdctl.runtime.checks.ground import Ground
from pdctl.runtime.machine.ports import wanted_bindings
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.plan import Plan


def listening(ground: Ground) -> dict[str, frozenset[int]]:
    """Host → every port that something listens on there now."""
    return ground.ask(None, lambda host: frozenset(one.port for one in host.survey.listeners()))


def busy(ground: Ground, listening: Mapping[str, frozenset[int]]) -> dict[str, frozenset[int]]:
    """What somebody else than this very cluster listens on, of what is listened on."""
    return {name: ports - ground.own_ports(name) for name, ports in listening.items()}


def check_ports(ground: Ground, plan: Plan) -> list[Diagnostic]:
    """Tries, on every host, each address that the plan listens on there."""
    answers = ground.ask(
        "checking ports",
        lambda host: host.survey.bindings(
            wanted_bindings(plan, host.name, own_ports=ground.own_ports(host.name))
        ),
    )
    return [ground.at_host(d, name) for name, problems in answers.items() for d in problems]


def mute_senders(problems: Iterable[Diagnostic]) -> frozenset[str]:
    """Replicas whose data or side port can't be listened on, which says why their pairs don't
    work."""
    kinds = (".data_port", ".side_port")
    return frozenset(d.replica for d in problems if d.replica and (d.field or "").endswith(kinds))
