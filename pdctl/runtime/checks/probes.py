"""Runs each replica's probe in its own environment, and judges what it says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from pdctl import __version__
from pdctl.engines.interface import Command, EngineSpec, Probe
from pdctl.engines.registry import spec_for
from pdctl.errors import HostError
from pdctl.runtime.hosts.installing import IN_ENGINES, install
from pdctl.runtime.hosts.interface import Completed, RuntimeHost
from pdctl.topology.checkpoint import Checkpoint
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import Engine, Replica

PROBE_TIMEOUT_S = 120.0

Task = tuple[Replica, RuntimeHost, Command]
Answer = Probe | Diagnostic


def run_probes(tasks: Sequence[Task], *, far: bool) -> dict[str, Answer]:
    """Replica → what its probe printed, or why there is nothing. Equal probes run once.

    Args:
        far: their host is another machine.
    """
    keys = {r.name: (host.name, msgspec.json.encode(command)) for r, host, command in tasks}
    distinct = {keys[r.name]: (host, command) for r, host, command in tasks}
    with ThreadPoolExecutor(2, thread_name_prefix="pdctl-probe") as pool:
        answers = dict(
            zip(distinct, pool.map(lambda task: _run(*task), distinct.values()), strict=True)
        )
    return {r.name: _read(r, command, answers[keys[r.name]], far) for r, _, command in tasks}


def _run(host: RuntimeHost, command: Command) -> Completed | HostError:
    try:
        return host.run(command, timeout_s=PROBE_TIMEOUT_S)
    except HostError as error:
        return error


def _read(replica: Replica, command: Command, answer: Completed | HostError, far: bool) -> Answer:
    python = command.argv[0]
    subject = f'replica "{replica.name}"'
    if isinstance(answer, HostError):
        place = f'host "{replica.host}": '
        text = f"{subject}: {answer.message.removeprefix(place)}"
        return Diagnostic(
            code="host.python", summary=text, replica=replica.name, field="python", hint=answer.hint
        )
    if answer.returncode == 0:
        try:
            return msgspec.json.decode(answer.stdout, type=Probe)
        except msgspec.MsgspecError:
            pass
    said = answer.stderr.decode("utf-8", "replace").strip()
    last = said.splitlines()[-1] if said else f"exit status {answer.returncode}"
    missing = re.search(r"No module named '?([\w]+)", last)
    where = replica.host if far else None
    hint = _missing(python, replica.engine, missing[1], where) if missing else None
    return Diagnostic(
        code="host.probe",
        summary=f"{subject}: {python} can't run {replica.engine}: {last[:300]}",
        detail=said[-4000:] if said != last else None,
        replica=replica.name,
        field="python",
        hint=hint,
    )


def _missing(python: str, engine: Engine, module: str, host: str | None) -> str | None:
    """What brings a module into a replica's environment; None: one of the engine's own.

    Args:
        host: as of `install`.
    """
    if engine is Engine.MLX:
        return install(python, host=host, extra="mlx")
    if module in ("pdctl", *IN_ENGINES):
        return install(python, host=host, alone=True)
    if module != engine:
        return None
    oldest, below = spec_for(engine).supported
    return f"{python} -m pip install '{engine}>={oldest},<{below}'"


def judge_probe(
    replica: Replica,
    spec: EngineSpec,
    probe: Probe,
    checkpoint: Checkpoint | None,
    *,
    remedy: str,
) -> list[Diagnostic]:
    """What a probe's answer means: versions, effective values, what the engine can't do.

    Args:
        remedy: what brings this very pdctl into that environment.
    """
    found = list(_versions(replica, spec, probe, remedy))
    effective = probe.effective or {}
    differing = []
    if checkpoint is not None:
        for field in ("attention", "positions"):
            expected = msgspec.to_builtins(
                checkpoint.attention if field == "attention" else checkpoint.positions(1)
            )
            names = list(unequal(expected, effective.get(field) or {}))
            differing += names
            found += [
                _misread(replica, field, name, expected[name], effective[field][name], probe)
                for name in names
            ]
    for problem in probe.problems:
        if not any(problem.startswith(name) for name in differing):
            summary = f'replica "{replica.name}": {replica.engine}: {problem}'
            found.append(
                Diagnostic(
                    code="host.unsupported", summary=summary, replica=replica.name, field="model"
                )
            )
    return found


def unequal(expected: Mapping[str, Any], effective: Mapping[str, Any]) -> Iterator[str]:
    """Names of the values that the engine reads otherwise than the file means them; what it
    does not tell is not compared."""
    for name, value in effective.items():
        if name == "context_length" or name not in expected:
            continue
        if value is None and name != "scaling":
            continue
        if _canonical(value) != _canonical(expected[name]):
            yield name


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _canonical(v) for k, v in sorted(value.items()) if v is not None}
    return value


def _misread(
    replica: Replica, field: str, name: str, expected: object, effective: object, probe: Probe
) -> Diagnostic:
    told = next((p for p in probe.problems if p.startswith(name)), None)
    return Diagnostic(
        code=f"contract.{field}",
        summary=f'replica "{replica.name}": {replica.engine} reads {name} as {effective}, '
        f"config.json means {expected}",
        detail=told,
        replica=replica.name,
        field=f"{field}.{name}",
        hint=f"write {name} at the top level of {replica.model}/config.json"
        if name == "rope_theta"
        else None,
    )


def _versions(
    replica: Replica, spec: EngineSpec, probe: Probe, remedy: str
) -> Iterator[Diagnostic]:
    oldest, below = spec.supported
    subject = f'replica "{replica.name}"'
    if not release(oldest) <= release(probe.engine_version) < release(below):
        yield Diagnostic(
            code="host.engine_version",
            summary=f"{subject}: {replica.engine} {probe.engine_version} is not supported",
            replica=replica.name,
            field="python",
            hint=f"supported: {oldest} and newer, below {below}",
        )
    if probe.pdctl_version != __version__:
        yield Diagnostic(
            code="host.pdctl_version",
            summary=f"{subject}: its environment has pdctl {probe.pdctl_version}, "
            f"and this is {__version__}",
            replica=replica.name,
            field="python",
            hint=f"the same version on both: {remedy}",
        )


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 31, 3) of "0.31.3.post1"."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
