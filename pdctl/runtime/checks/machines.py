"""Whether each host is fit at all: versions, disk, clock; and what is known of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from importlib import metadata

import msgspec

from pdctl import __version__
from pdctl.engines.interface import Command
from pdctl.errors import HostError
from pdctl.runtime.checks.ground import Ground
from pdctl.runtime.checks.probes import release
from pdctl.runtime.hosts.installing import install
from pdctl.runtime.hosts.interface import RuntimeHost
from pdctl.runtime.hosts.survey import HostFacts
from pdctl.topology.diagnostics import Diagnostic, Severity
from pdctl.topology.model import Host
from pdctl.topology.sizes import approximate_size
from pdctl.trace import monotonic_s

OLDEST_PYTHON = (3, 11)
LOW_DISK_BYTES = 200_000_000
FULL_DISK_BYTES = 1 << 20
CLOCK_SKEW_S = 2.0
FACTS_S = 60.0


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One host at one moment."""

    facts: HostFacts
    """`python` and versions are those of the interpreter that would run the agent."""
    clock_offset_s: float
    """Its clock minus ours."""
    clock_doubt_s: float
    """The offset is that right, at least."""
    round_trip_s: float | None
    """Of the connection; None for this machine."""
    reached_s: float | None = None
    """What connecting took; None for this machine."""


def see_all(ground: Ground) -> dict[str, Seen]:
    """Host → what it is; without those that can't be reached."""
    step, declared = "checking versions, disk and clock", ground.topology.hosts
    return ground.ask(step, lambda host: see(host, declared[host.name]))


def see(host: RuntimeHost, declared: Host) -> Seen:
    """Asks one host. HostError where it can't be reached, or its agent's Python can't run."""
    reached_s = _connected(host) if declared.ssh is not None else None
    before_s = time.time()
    facts = host.survey.facts()
    after_s = time.time()
    offset_s: float | None = getattr(host, "clock_offset_s", None)
    round_trip_s: float | None = getattr(host, "round_trip_s", None)
    doubt_s = (after_s - before_s) / 2
    if offset_s is not None and round_trip_s is not None:
        doubt_s = round_trip_s / 2
    else:
        offset_s = facts.clock_s - (before_s + after_s) / 2
    if declared.ssh is None:
        offset_s = 0.0
        if declared.agent_python is not None:
            facts = _agents_facts(host, declared.agent_python)
    return Seen(
        facts=facts,
        clock_offset_s=offset_s,
        clock_doubt_s=doubt_s,
        round_trip_s=round_trip_s,
        reached_s=reached_s,
    )


def _connected(host: RuntimeHost) -> float:
    """Connects where that is a thing of its own, and says how long it took."""
    began_s = monotonic_s()
    connect = getattr(host, "connect", None)
    if connect is not None:
        connect()
    return monotonic_s() - began_s


def _agents_facts(host: RuntimeHost, python: str) -> HostFacts:
    """What another interpreter of this machine is. HostError where it does not tell."""
    command = Command(argv=(python, "-m", "pdctl.runtime.hosts.facts"))
    done = host.run(command, timeout_s=FACTS_S)
    if done.returncode == 0:
        try:
            return msgspec.json.decode(done.stdout, type=HostFacts)
        except msgspec.MsgspecError:
            pass
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    reason = said[-1][:300] if said else f"exit status {done.returncode}"
    raise HostError(
        f'host "{host.name}": agent_python {python} can\'t run an agent: {reason}',
        hint=install(python, host=None),
    )


def judge(ground: Ground, seen: Mapping[str, Seen]) -> list[Diagnostic]:
    """What the facts of every host mean."""
    return [
        problem
        for name, one in seen.items()
        for problem in judge_one(ground.topology.hosts[name], one)
    ]


def judge_one(host: Host, seen: Seen) -> list[Diagnostic]:
    return [*_versions(host, seen.facts), *_disk(host, seen.facts), *_clock(host, seen)]


def _versions(host: Host, facts: HostFacts) -> Iterator[Diagnostic]:
    place = "agent_python" if host.agent_python is not None else "python"
    field = f"hosts.{host.name}.{place}"
    if facts.pdctl_version != __version__:
        yield Diagnostic(
            code="host.pdctl_version",
            summary=f'host "{host.name}": {facts.python} has pdctl {facts.pdctl_version}, and '
            f"this is {__version__}",
            field=field,
            hint=install(facts.python, host=host.name if host.ssh is not None else None),
        )
    if release(facts.python_version) < OLDEST_PYTHON:
        yield Diagnostic(
            code="host.python_version",
            summary=f'host "{host.name}": {facts.python} is Python {facts.python_version}; '
            "3.11 is the oldest that runs an agent",
            field=field,
            hint=f"name a newer interpreter: agent_python under [hosts.{host.name}]",
        )
    own = metadata.version("xoscar")
    hint = f"there: {facts.python} -m pip install xoscar=={own}"
    if facts.xoscar_version is None:
        yield Diagnostic(
            code="host.rpc_version",
            summary=f'host "{host.name}": {facts.python} has no xoscar, which an agent needs',
            field=field,
            hint=hint,
        )
    elif release(facts.xoscar_version)[:2] != release(own)[:2]:
        yield Diagnostic(
            code="host.rpc_version",
            summary=f'host "{host.name}": {facts.python} has xoscar {facts.xoscar_version}, and '
            f"this is {own}: they don't understand each other",
            field=field,
            hint=hint,
        )


def _disk(host: Host, facts: HostFacts) -> Iterator[Diagnostic]:
    free = facts.disk_free_bytes
    if free >= LOW_DISK_BYTES:
        return
    full = free < FULL_DISK_BYTES
    left = "nothing is" if full else f"only {approximate_size(free)} are"
    yield Diagnostic(
        severity=Severity.ERROR if full else Severity.WARNING,
        code="host.disk_full" if full else "host.disk",
        summary=f'host "{host.name}": {left} free on the disk of {facts.state_home}, where logs '
        "and state are written",
        field=f"hosts.{host.name}",
        hint="free some space there, or set XDG_STATE_HOME to another disk",
    )


def _clock(host: Host, seen: Seen) -> Iterator[Diagnostic]:
    if abs(seen.clock_offset_s) <= CLOCK_SKEW_S + seen.clock_doubt_s:
        return
    way = "ahead of" if seen.clock_offset_s > 0 else "behind"
    yield Diagnostic(
        severity=Severity.WARNING,
        code="host.clock",
        summary=f'host "{host.name}": its clock is {abs(seen.clock_offset_s):.1f} s {way} this '
        "machine's; tickets are corrected for that, times in its logs are not",
        field=f"hosts.{host.name}",
        hint="let NTP set it: timedatectl set-ntp true",
    )
