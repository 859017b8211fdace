"""What each replica would serve: its checkpoint, its engine's view of it, its contract."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from pdctl.engines.interface import Command
from pdctl.engines.registry import spec_for
from pdctl.runtime.checks.ground import Ground
from pdctl.runtime.checks.natives import judge_native
from pdctl.runtime.checks.outcome import ModelFacts
from pdctl.runtime.checks.probes import Answer, judge_probe, run_probes
from pdctl.runtime.checks.reads import judge_reads
from pdctl.runtime.hosts.installing import install
from pdctl.runtime.hosts.interface import RuntimeHost
from pdctl.runtime.hosts.survey import CheckpointRead
from pdctl.topology.checkpoint import check_context
from pdctl.topology.contract import Contract
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.differences import Side
from pdctl.topology.fingerprint import (
    Fingerprint,
    FingerprintError,
    check_dtype,
    make_contract,
)
from pdctl.topology.model import Engine, Replica

T = TypeVar("T")
Content = Fingerprint | FingerprintError

AT_HOST = {"topology.model_missing": "host.model_missing",
           "topology.model_garbled": "host.model_garbled"}  # fmt: skip
"""What is a fault of the file on this machine is one of a host that lies elsewhere."""


class Models:
    """Learns about every replica's model, host by host."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.known: dict[str, ModelFacts] = {}
        """Replica → what is known so far; absent where its checkpoint can't be served."""

    def read(self, *, near_only: bool = False) -> list[Diagnostic]:
        """config.json of every replica's checkpoint; weights are not touched.

        Args:
            near_only: on this machine only: no connection is made.
        """
        ground = self._ground
        used = {r.host for r in ground.topology.replicas} & ground.hosts.keys()
        names = [n for n in used if not near_only or not ground.is_far(n)]

        def question(host: RuntimeHost) -> dict[str, CheckpointRead]:
            wanted = [r for r in ground.topology.replicas if r.host == host.name]
            return {r.name: host.survey.checkpoint(r.model) for r in wanted if r.model != "/"}

        answers = _merged(ground.ask("reading checkpoints", question, names).values())
        found: list[Diagnostic] = []
        for i, r in enumerate(ground.topology.replicas):
            read = answers.get(r.name)
            if read is None:
                continue
            field = f"replicas[{i}].model"
            found += [self._model_problem(d, r, field) for d in read.problems]
            if read.checkpoint is not None:
                self.known[r.name] = ModelFacts(
                    replica=r.name,
                    model_dir=read.model_dir,
                    real_dir=read.real_dir,
                    checkpoint=read.checkpoint,
                )
        checkpoints = [facts.checkpoint for facts in self.known.values()]
        if len({c.max_positions for c in checkpoints}) == 1:
            found += check_context(checkpoints[0], ground.topology.model.context_length)
        return found

    def probe(self) -> list[Diagnostic]:
        """Every replica's environment, asked in place."""
        probes = self._ground.ask("checking environments", self._probe, self._places())
        found = [
            problem
            for name, answer in _merged(probes.values()).items()
            for problem in self._probed(self._ground.topology.replica(name), answer)
        ]
        answered = {name: facts.probe for name, facts in self.known.items() if facts.probe}
        found += judge_native(self._ground.topology, answered)
        return [*found, *judge_reads(self._ground.topology, answered)]

    def no_nixl(self) -> dict[str, str]:
        """Replica → why NIXL can't be used in its environment; after `probe`."""
        probes = {name: facts.probe for name, facts in self.known.items() if facts.probe}
        return {name: p.nixl_problem for name, p in probes.items() if p.nixl_problem}

    def fingerprint(self) -> list[Diagnostic]:
        """One fingerprint per directory of each host; then every replica's contract."""
        contents = self._ground.ask("fingerprinting", self._fingerprints, self._places())
        found: list[Diagnostic] = []
        for host, by_place in contents.items():
            found += self._fingerprinted(host, by_place)
        return found

    def sides(self) -> list[Side]:
        """Every replica whose contract is known, for comparison."""
        found = []
        for r in self._ground.topology.replicas:
            facts = self.known.get(r.name)
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
        return next((f.contract for f in self.known.values() if f.contract), None)

    def _places(self) -> set[str]:
        """Hosts with a replica whose checkpoint can be served."""
        return {r.host for r in self._ground.topology.replicas if r.name in self.known}

    def _on(self, host: str) -> list[Replica]:
        replicas = self._ground.topology.replicas
        return [r for r in replicas if r.host == host and r.name in self.known]

    def _probe(self, host: RuntimeHost) -> dict[str, Answer]:
        tasks = [(r, host, self._command(r)) for r in self._on(host.name)]
        return run_probes(tasks, far=self._ground.is_far(host.name))

    def _command(self, replica: Replica) -> Command:
        declared = self._ground.topology.hosts[replica.host]
        return spec_for(replica.engine).probe(replica, declared)

    def _probed(self, replica: Replica, answer: Answer) -> list[Diagnostic]:
        facts = self.known[replica.name]
        if isinstance(answer, Diagnostic):
            return [self._ground.at_host(answer, replica.host)]
        self.known[replica.name] = msgspec.structs.replace(facts, probe=answer)
        remedy = install(
            self._command(replica).argv[0],
            host=replica.host if self._ground.is_far(replica.host) else None,
            alone=replica.engine is not Engine.MLX,
        )
        spec = spec_for(replica.engine)
        judged = judge_probe(replica, spec, answer, facts.checkpoint, remedy=remedy)
        return [self._ground.at_host(d, replica.host) for d in judged]

    def _fingerprints(self, host: RuntimeHost) -> dict[str, Content]:
        """Real directory → its content, each read once."""
        found: dict[str, Content] = {}
        for r in self._on(host.name):
            facts = self.known[r.name]
            if facts.real_dir in found:
                continue
            progress = self._ground.progress(host.name, facts.model_dir)
            try:
                found[facts.real_dir] = host.survey.fingerprint(
                    facts.model_dir, facts.checkpoint, progress
                )
            except FingerprintError as error:
                found[facts.real_dir] = error
        return found

    def _fingerprinted(self, host: str, by_place: dict[str, Content]) -> list[Diagnostic]:
        found: list[Diagnostic] = []
        told: set[str] = set()
        model = self._ground.topology.model
        for r in self._on(host):
            facts = self.known[r.name]
            content = by_place[facts.real_dir]
            if isinstance(content, FingerprintError):
                code = "topology.model_garbled"
                problem = Diagnostic(code=code, summary=content.message, hint=content.hint)
                found.append(self._model_problem(problem, r, None))
                continue
            if facts.real_dir not in told:
                told.add(facts.real_dir)
                casts = check_dtype(content, model.dtype)
                found += [self._ground.of_replica(d, r, d.field) for d in casts]
            contract = make_contract(
                facts.checkpoint, content, dtype=model.dtype, context_length=model.context_length
            )
            self.known[r.name] = msgspec.structs.replace(facts, content=content, contract=contract)
        return found

    def _model_problem(
        self, problem: Diagnostic, replica: Replica, field: str | None
    ) -> Diagnostic:
        if self._ground.is_far(replica.host):
            code = AT_HOST.get(problem.code, problem.code)
            hint = problem.hint
            if code == "host.model_missing":
                hint = (
                    f"copy the checkpoint to {replica.host}, for example with rsync or scp, or "
                    "correct `model`: a directory there that holds config.json"
                )
            problem = msgspec.structs.replace(problem, code=code, hint=hint)
        return self._ground.of_replica(problem, replica, field)


def _merged(answers: Iterable[dict[str, T]]) -> dict[str, T]:
    return {name: answer for by_name in answers for name, answer in by_name.items()}
