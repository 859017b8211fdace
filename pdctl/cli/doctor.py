"""`pdctl doctor`: each host, and each pair's link."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from pdctl.cli import render
from pdctl.cli.arguments import Cluster
from pdctl.runtime.checks.doctor import diagnose, exit_code, of_bad_file
from pdctl.runtime.checks.findings import Findings, HostFound, PairFound
from pdctl.runtime.checks.ground import Ground
from pdctl.runtime.checks.validation import check_file
from pdctl.runtime.cluster.state import own_plan, running
from pdctl.runtime.hosts.reach import Hosts
from pdctl.topology.diagnostics import Diagnostic, Report
from pdctl.topology.load import read
from pdctl.topology.model import Topology
from pdctl.topology.plan import Plan
from pdctl.topology.sizes import approximate_size


def doctor(
    topology: Cluster,
    as_json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON.")] = False,
) -> None:
    """Test each host (SSH, versions, ports, clock, disk, memory) and measure each pair's link.

    Nothing is launched, and a running cluster stays as it is: where it has a data port itself,
    a free port beside it is tried. What is closed is shown with the command that opens it and
    the one that tests it by hand."""
    asked = _asked(topology)
    report = Report.of(asked.found)
    declared = asked.topology
    if declared is None or not report.valid:
        _tell(of_bad_file(report, declared.name if declared else None), as_json=as_json)
        raise typer.Exit(report.exit_code)
    with render.steps() as watcher, Hosts(declared.hosts) as hosts:
        ground = Ground(declared, hosts, watcher, kept=asked.kept)
        findings = diagnose(ground, asked.found)
    _tell(findings, as_json=as_json)
    raise typer.Exit(exit_code(findings))


class Asked(NamedTuple):
    """What to examine: a file's topology, or what runs under a name."""

    topology: Topology | None
    found: list[Diagnostic]
    kept: Plan | None


def _asked(target: str) -> Asked:
    path = Path(target).expanduser()
    if path.is_file() or os.sep in target or path.suffix:
        draft = read(path)
        return Asked(draft.topology, check_file(draft), own_plan(path))
    _, record = running(target)
    return Asked(record.topology, [], record.plan)


def _tell(findings: Findings, *, as_json: bool) -> None:
    if as_json:
        render.print_json(findings)
        return
    if findings.hosts:
        _show(findings)
    render.show_diagnostics(Report.of(findings.diagnostics))


def _show(findings: Findings) -> None:
    console = render.stdout()
    if console.is_terminal:
        for table in _tables(findings):
            console.print(table)
            console.print()
    else:
        for host in findings.hosts:
            for line in _host_lines(host):
                console.print(f"host {host.name}: {line}", soft_wrap=True)
        for pair in findings.pairs:
            where = f"{pair.prefill_host} → {pair.decode_host}"
            line = f"pair {_path(pair)}: {where} at {_at(pair)}: {_link(pair)}"
            console.print(line, soft_wrap=True)
    for pair in findings.pairs:
        for line in _by_hand(pair):
            console.print(f"pair {_path(pair)}: {line}", soft_wrap=True)
    console.print(f"data plane: {findings.data_plane}", soft_wrap=True)
    console.print(_verdict(findings), soft_wrap=True)


def _host_lines(host: HostFound) -> Iterator[str]:
    yield _reached(host)
    if host.error is not None:
        return
    yield f"{_versions(host)} ({host.python})"
    yield from _engines(host)
    yield _ports(host)
    yield f"clock {_clock(host)}, {_disk(host)} of disk and {_memory(host)} of memory free"
    yield from _devices(host)


def _tables(findings: Findings) -> Iterator[object]:
    from rich.table import Table

    hosts = Table(
        *("host", "reached", "versions", "engines", "ports", "clock", "disk", "memory"),
        box=None,
        pad_edge=False,
    )
    for host in findings.hosts:
        if host.error is not None:
            hosts.add_row(host.name, "not reached", *[""] * 6, style="red")
            continue
        memory = "\n".join([_memory(host), *_devices(host)])
        engines = "\n".join(_engines(host))
        cells = (_reached(host), _versions(host), engines, _ports(host), _clock(host))
        hosts.add_row(host.name, *cells, _disk(host), memory)
    yield hosts
    if findings.pairs:
        pairs = Table("pair", "from → to", "at", "link", box=None, pad_edge=False)
        for pair in findings.pairs:
            where = f"{pair.prefill_host} → {pair.decode_host}"
            style = "red" if pair.error else ""
            pairs.add_row(_path(pair), where, _at(pair), _link(pair), style=style)
        yield pairs


def _reached(host: HostFound) -> str:
    if host.destination is None:
        return "this machine"
    if host.error is not None:
        return f"not reached by ssh {host.destination}"
    trip = f", round trip {host.round_trip_ms:.1f} ms" if host.round_trip_ms is not None else ""
    return f"reached in {host.reached_ms or 0:.0f} ms by ssh {host.destination}{trip}"


def _versions(host: HostFound) -> str:
    xoscar = host.xoscar_version or "missing"
    return f"Python {host.python_version}, pdctl {host.pdctl_version}, xoscar {xoscar}"


def _engines(host: HostFound) -> list[str]:
    return [
        f"{one.replica}: {one.engine} {one.engine_version or 'unknown'}" for one in host.engines
    ]


def _ports(host: HostFound) -> str:
    by_state = {
        state: [str(one.port) for one in host.ports if one.state == state]
        for state in ("free", "own", "closed")
    }
    words = {"free": "free", "own": "this cluster's own", "closed": "can't be listened on"}
    parts = [f"{', '.join(ports)} {words[state]}" for state, ports in by_state.items() if ports]
    return f"ports {'; '.join(parts)}" if parts else "no ports"


def _clock(host: HostFound) -> str:
    if host.destination is None:
        return "this machine's"
    return f"{host.clock_offset_s or 0.0:+.3f} s"


def _disk(host: HostFound) -> str:
    return approximate_size(host.disk_free_bytes or 0)


def _memory(host: HostFound) -> str:
    return approximate_size(host.memory_free_bytes or 0)


def _devices(host: HostFound) -> list[str]:
    return [
        f"device {d.index} ({d.name}): {approximate_size(d.free_bytes)} of "
        f"{approximate_size(d.total_bytes)} free"
        for d in host.devices
    ]


def _path(pair: PairFound) -> str:
    return f"{pair.prefill}>{pair.decode}"


def _at(pair: PairFound) -> str:
    host = f"[{pair.address}]" if ":" in pair.address else pair.address
    return f"{host}:{pair.port}"


def _link(pair: PairFound) -> str:
    note = f" ({pair.note})" if pair.note else ""
    if pair.error is not None:
        return f"{'closed' if pair.tried else 'not tried'}: {pair.error}{note}"
    if pair.round_trip_ms is None:
        return f"open{note}"
    speed = f", {approximate_size(round(pair.bytes_per_s))}/s" if pair.bytes_per_s else ""
    return f"round trip {pair.round_trip_ms:.3f} ms{speed}{note}"


def _by_hand(pair: PairFound) -> Iterator[str]:
    if pair.opens is not None:
        yield f"to open it: {pair.opens}"
    if pair.tests:
        yield f"to test it: {pair.tests[0]}"
        yield f"and then: {pair.tests[1]}"


def _verdict(findings: Findings) -> str:
    hosts = render.counted(len(findings.hosts), "host")
    pairs = render.counted(len(findings.pairs), "pair")
    return f"{findings.cluster}: {hosts}, {pairs}: {'all is well' if findings.fit else 'not fit'}"
