"""Everything that can be known before launch: one function for `validate`, `plan` and `up`.

Order: the file → model directories → environments (probes) → fingerprints → contracts → ports
→ memory. A broken file stops it before any process is started; otherwise every step adds what
it finds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import psutil

from pdctl.engines.interface import EngineSpec
from pdctl.engines.registry import spec_for
from pdctl.errors import PdctlError
from pdctl.runtime.hosts.interface import RuntimeHost
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.outcome import ModelFacts, Silent, Validation, Watcher
from pdctl.runtime.ports import wanted_bindings
from pdctl.runtime.probes import judge_probe, run_probes
from pdctl.topology import limits, rules
from pdctl.topology.checkpoint import check_context, read_checkpoint
from pdctl.topology.contract import Contract
from pdctl.topology.diagnostics import Diagnostic, Report, Severity
from pdctl.topology.differences import Side, explain_all
from pdctl.topology.digests import DigestCache
from pdctl.topology.fingerprint import (
    Fingerprint,
    FingerprintError,
    check_dtype,
    fingerprint,
    make_contract,
)
from pdctl.topology.load import Draft, read
from pdctl.topology.model import Host, Replica, Topology
from pdctl.topology.plan import Plan, derive
from pdctl.topology.sizes import approximate_size

__all__ = ["ModelFacts", "Silent", "Validation", "Watcher", "check_file", "local_host", "validate"]


def local_host(host: Host) -> RuntimeHost:
    return LocalHost(host.name)


def validate(
    path: str | os.PathLike[str],
    *,
    offline: bool = False,
    environ: Mapping[str, str] | None = None,
    reach: Callable[[Host], RuntimeHost] = local_host,
    watcher: Watcher | None = None,
    cache: DigestCache | None = None,
    own_ports: frozenset[int] = frozenset(),
    kept: Plan | None = None,
) -> Validation:
    """Validates a topology file; never raises for what it finds.

    Args:
        offline: the file alone; no host is touched, and no checkpoint is read.
        environ: the launching process's environment; its own by default.
        reach: how to get to a host.
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
    work = _Work(draft.topology, reach, watcher or Silent(), cache, own_ports, kept)
    return work.run(found)


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


class _Work:
    """One validation that touches hosts; keeps what the steps learn."""

    def __init__(
        self,
        topology: Topology,
        reach: Callable[[Host], RuntimeHost],
        watcher: Watcher,
        cache: DigestCache | None,
        own_ports: frozenset[int],
        kept: Plan | None,
    ) -> None:
        self.topology = topology
        self.watcher = watcher
        self.cache = cache or DigestCache()
        self.own_ports = own_ports
        self.kept = kept
        names = {topology.router.host, *(r.host for r in topology.replicas)}
        self.hosts = {n: reach(topology.hosts[n]) for n in names if n in topology.hosts}
        self.models: dict[str, ModelFacts] = {}

    def run(self, found: list[Diagnostic]) -> Validation:
        broken = _has_error(found)
        found = found + self.read_models()
        if broken:
            return Validation(report=Report.of(found))
        found += self.probe()
        found += self.fingerprint()
        contract = self.contract()
        found += explain_all(self.sides())
        if contract is not None:
            found += rules.check_buffer(self.topology, contract)
        plan: Plan | None = None
        try:
            plan = derive(self.topology, contract, busy=self.busy(), kept=self.kept)
            found += self.listening(plan)
            found += self.memory(plan)
        except PdctlError as error:
            found.append(Diagnostic(code="host.ports", summary=error.message, hint=error.hint))
        report = Report.of(found)
        return Validation(
            report=report,
            topology=self.topology if report.valid else None,
            plan=plan if report.valid else None,
            contract=contract if report.valid else None,
            models=self.models,
        )

    def read_models(self) -> list[Diagnostic]:
        """config.json of every replica's checkpoint."""
        self.watcher.step("reading checkpoints")
        found: list[Diagnostic] = []
        for i, r in enumerate(self.topology.replicas):
            if r.model == "/" or r.host not in self.hosts:
                continue
            model_dir = Path(r.model).expanduser()
            checkpoint, problems = read_checkpoint(model_dir)
            found += [_of_replica(d, r, f"replicas[{i}].model") for d in problems]
            if checkpoint is not None:
                self.models[r.name] = ModelFacts(
                    replica=r.name, model_dir=os.fspath(model_dir), checkpoint=checkpoint
                )
        checkpoints = [facts.checkpoint for facts in self.models.values()]
        if len({c.max_positions for c in checkpoints}) == 1:
            found += check_context(checkpoints[0], self.topology.model.context_length)
        return found

    def probe(self) -> list[Diagnostic]:
        """Every replica's environment, asked in place."""
        self.watcher.step("checking environments")
        tasks = [
            (r, self.hosts[r.host], self.spec(r).probe(r, self.topology.hosts[r.host]))
            for r in self.topology.replicas
            if r.name in self.models
        ]
        found: list[Diagnostic] = []
        for (r, _, _), answer in zip(tasks, run_probes(tasks).values(), strict=True):
            if isinstance(answer, Diagnostic):
                found.append(answer)
                continue
            facts = self.models[r.name]
            self.models[r.name] = msgspec.structs.replace(facts, probe=answer)
            found += judge_probe(r, self.spec(r), answer, facts.checkpoint)
        return found

    def fingerprint(self) -> list[Diagnostic]:
        """One fingerprint per distinct directory; then every replica's contract."""
        found: list[Diagnostic] = []
        known: dict[str, Fingerprint | FingerprintError] = {}
        model = self.topology.model
        for r in self.topology.replicas:
            facts = self.models.get(r.name)
            if facts is None:
                continue
            place = os.path.realpath(facts.model_dir)
            first = place not in known
            if first:
                self.watcher.step(f"fingerprinting {facts.model_dir}")
                known[place] = self.fingerprint_one(facts)
            content = known[place]
            if isinstance(content, FingerprintError):
                problem = Diagnostic(
                    code="topology.model_garbled", summary=content.message, hint=content.hint
                )
                found.append(_of_replica(problem, r, None))
                continue
            if first:
                found += [_of_replica(d, r, d.field) for d in check_dtype(content, model.dtype)]
            contract = make_contract(
                facts.checkpoint, content, dtype=model.dtype, context_length=model.context_length
            )
            self.models[r.name] = msgspec.structs.replace(facts, content=content, contract=contract)
        return found

    def fingerprint_one(self, facts: ModelFacts) -> Fingerprint | FingerprintError:
        def advance(done: int, total: int) -> None:
            self.watcher.hashing(facts.model_dir, done, total)

        try:
            return fingerprint(
                Path(facts.model_dir), facts.checkpoint, cache=self.cache, progress=advance
            )
        except FingerprintError as error:
            return error

    def sides(self) -> list[Side]:
        found = []
        for r in self.topology.replicas:
            facts = self.models.get(r.name)
            if facts is not None and facts.contract is not None and facts.content is not None:
                found.append(
                    Side(
                        replica=r.name,
                        role=r.role,
                        host=r.host,
                        model_dir=facts.model_dir,
                        contract=facts.contract,
                        content=facts.content,
                    )
                )
        return found

    def contract(self) -> Contract | None:
        return next((f.contract for f in self.models.values() if f.contract), None)

    def busy(self) -> dict[str, frozenset[int]]:
        return {
            name: frozenset(listener.port for listener in host.listeners()) - self.own_ports
            for name, host in self.hosts.items()
        }

    def listening(self, plan: Plan) -> list[Diagnostic]:
        self.watcher.step("checking ports")
        return [
            problem
            for name, host in self.hosts.items()
            for problem in host.survey.bindings(
                wanted_bindings(plan, name, own_ports=self.own_ports)
            )
        ]

    def memory(self, plan: Plan) -> list[Diagnostic]:
        """Warns where the replicas need more than this machine has free, by estimate."""
        need = 0
        for r in plan.replicas:
            facts = self.models.get(r.name)
            if facts is not None and facts.contract is not None and facts.content is not None:
                spec = self.spec(r.declared)
                need += spec.memory_bytes(r, facts.contract, facts.content.total_bytes)
        free = psutil.virtual_memory().available
        if need <= free:
            return []
        return [
            Diagnostic(
                severity=Severity.WARNING,
                code="host.memory",
                summary=f"the replicas need about {approximate_size(need)}, and this machine "
                f"has {approximate_size(free)} free",
                hint="take a smaller context_length, or fewer replicas per host",
            )
        ]

    def spec(self, replica: Replica) -> EngineSpec:
        return spec_for(replica.engine)


def _of_replica(diagnostic: Diagnostic, replica: Replica, field: str | None) -> Diagnostic:
    return msgspec.structs.replace(
        diagnostic,
        summary=f'replica "{replica.name}": {diagnostic.summary}',
        replica=replica.name,
        field=field,
    )


def _has_error(found: Iterable[Diagnostic]) -> bool:
    return any(d.severity is Severity.ERROR for d in found)
