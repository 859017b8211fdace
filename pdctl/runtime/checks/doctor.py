"""`doctor`: every host, and the link of every pair, tested and measured.

No weights are read and nothing is launched; a running cluster is not disturbed, but shares its
links with the measurement for some seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdctl.errors import HostError, PdctlError
from pdctl.runtime.checks import links, machines, network, speeds
from pdctl.runtime.checks.findings import EngineFound, Findings, HostFound, PairFound, PortFound
from pdctl.runtime.checks.ground import Ground
from pdctl.runtime.checks.models import Models
from pdctl.runtime.checks.routes import check_routes
from pdctl.runtime.machine.ports import wanted_bindings
from pdctl.topology.diagnostics import Diagnostic, Report
from pdctl.topology.plan import Plan, derive


def of_bad_file(report: Report, cluster: str | None) -> Findings:
    """Nothing was asked: the file itself is wrong."""
    return Findings(
        cluster=cluster,
        fit=False,
        running=False,
        encrypt=None,
        data_plane=None,
        diagnostics=report.diagnostics,
    )


def exit_code(findings: Findings) -> int:
    """0; or 4: a host or a pair is not fit, whatever about it."""
    return 0 if findings.fit else HostError.exit_code


def diagnose(ground: Ground, warnings: list[Diagnostic]) -> Findings:
    """Asks every host, then dials and measures every pair.

    Args:
        warnings: what the file showed, without errors.
    """
    topology = ground.topology
    seen = machines.see_all(ground)
    models = Models(ground)
    found = [*warnings, *machines.judge(ground, seen), *models.read(), *models.probe()]
    pairs: list[PairFound] = []
    ports: dict[str, tuple[PortFound, ...]] = {}
    try:
        listening = network.listening(ground)
        plan = derive(
            topology,
            busy=network.busy(ground, listening),
            kept=ground.kept,
            no_nixl=models.no_nixl(),
        )
    except PdctlError as error:
        found.append(Diagnostic(code="host.ports", summary=error.message, hint=error.hint))
    else:
        closed = network.check_ports(ground, plan)
        ports = {name: _ports(ground, plan, name, closed) for name in ground.reached}
        found += [*closed, *check_routes(ground)]
        pairs, refusals = _pairs(ground, plan, listening, network.mute_senders(closed))
        found += refusals
    report = Report.of([*ground.losses(), *found])
    hosts = [_host(ground, name, seen, models, ports.get(name, ())) for name in ground.hosts]
    return Findings(
        cluster=topology.name,
        fit=report.valid,
        running=ground.kept is not None,
        encrypt=topology.handoff.encrypt,
        data_plane=_data_plane(topology.handoff.encrypt),
        hosts=tuple(hosts),
        pairs=tuple(pairs),
        diagnostics=report.diagnostics,
    )


def _data_plane(encrypt: bool) -> str:
    if encrypt:
        return "TLS 1.3, with a certificate that `up` makes; measured with one for this trial"
    return "plain TCP, with tickets and checksums; encrypt = true under [handoff] adds TLS 1.3"


def _host(
    ground: Ground,
    name: str,
    seen: Mapping[str, machines.Seen],
    models: Models,
    ports: tuple[PortFound, ...],
) -> HostFound:
    destination = ground.topology.hosts[name].ssh
    lost = ground.lost.get(name)
    if lost is not None or name not in seen:
        error = lost.message if lost is not None else "it was not asked"
        return HostFound(name=name, destination=destination, error=error)
    one = seen[name]
    return HostFound(
        name=name,
        destination=destination,
        reached_ms=_ms(one.reached_s),
        round_trip_ms=_ms(one.round_trip_s),
        python=one.facts.python,
        python_version=one.facts.python_version,
        pdctl_version=one.facts.pdctl_version,
        xoscar_version=one.facts.xoscar_version,
        clock_offset_s=round(one.clock_offset_s, 4),
        disk_free_bytes=one.facts.disk_free_bytes,
        memory_free_bytes=one.facts.memory_free_bytes,
        devices=one.facts.devices,
        engines=_engines(ground, name, models),
        ports=ports,
    )


def _engines(ground: Ground, host: str, models: Models) -> tuple[EngineFound, ...]:
    found = []
    for r in ground.topology.replicas:
        if r.host == host:
            facts = models.known.get(r.name)
            probe = facts.probe if facts is not None else None
            found.append(
                EngineFound(
                    replica=r.name,
                    engine=r.engine,
                    engine_version=probe.engine_version if probe else None,
                    python_version=probe.python_version if probe else None,
                    pdctl_version=probe.pdctl_version if probe else None,
                )
            )
    return tuple(found)


def _ports(
    ground: Ground, plan: Plan, host: str, closed: list[Diagnostic]
) -> tuple[PortFound, ...]:
    found = []
    for binding in wanted_bindings(plan, host):
        address, port = binding.address
        state = "own" if port in ground.own_ports(host) else "free"
        if any(d.summary.startswith(f"{binding.subject}: ") for d in closed):
            state = "closed"
        found.append(PortFound(subject=binding.subject, address=address, port=port, state=state))
    return tuple(found)


def _pairs(
    ground: Ground, plan: Plan, listening: Mapping[str, frozenset[int]], mute: frozenset[str]
) -> tuple[list[PairFound], list[Diagnostic]]:
    """Every pair, tried at once; those that work are then measured one after another."""
    ground.watcher.step("dialling every pair")
    trials = [speeds.beside(ground, trial, plan, listening) for trial in links.trials_of(plan)]
    able = [trial for trial in trials if trial.sender.name not in mute]
    tried = {t.trial.pair.path: t for t in links.try_links(ground, able)}
    found, refusals = [], []
    for trial in trials:
        one = speeds.measured(ground, trial, tried.get(trial.pair.path))
        if one is not None and one.dialled.error is not None:
            refusals.append(links.refusal(ground, one))
        found.append(_pair(ground, trial, one))
    return found, refusals


def _pair(ground: Ground, trial: links.Trial, tried: links.Tried | None) -> PairFound:
    own, beside = trial.sender.sender_port, trial.port
    note = None
    if beside != own:
        note = f"port {own} is in use by this cluster itself; tried beside it at {beside}"
    if tried is not None and tried.trial.port != beside:
        trial = tried.trial
        note = f"port {own} is this cluster's own; {beside} beside it is closed: not measured"
    host, port = trial.address
    hosts = ground.topology.hosts
    sender, receiver = hosts[trial.sender.host], hosts[trial.receiver.host]
    common = PairFound(
        prefill=trial.pair.prefill,
        decode=trial.pair.decode,
        prefill_host=sender.name,
        decode_host=receiver.name,
        transport=trial.pair.transport,
        address=host,
        port=port,
        note=note,
    )
    if tried is None:
        why = _untried(ground, trial)
        return msgspec.structs.replace(common, port=own or port, note=None, tried=False, error=why)
    dialled = tried.dialled
    closed = dialled.error is not None
    return msgspec.structs.replace(
        common,
        error=dialled.error,
        resolved=dialled.resolved,
        round_trip_ms=_ms(dialled.round_trip_s),
        bytes_per_s=dialled.bytes_per_s,
        opens=links.opens(sender, port) if closed else None,
        tests=links.tests(sender, receiver, trial.address) if closed else (),
    )


def _untried(ground: Ground, trial: links.Trial) -> str:
    ends = dict.fromkeys((trial.sender.host, trial.receiver.host))
    lost = [name for name in ends if name in ground.lost]
    if not lost:
        return f"{trial.sender.name} can't listen there"
    many = "hosts" if len(lost) > 1 else "host"
    return f"{many} {' and '.join(lost)} can't be reached"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
