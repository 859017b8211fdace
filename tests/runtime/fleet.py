"""Several machines without SSH: this one under other names, each with facts, probes, ports and
faults of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdctl import __version__
from pdctl.engines.interface import Command, Probe
from pdctl.errors import HostError
from pdctl.runtime.hosts.interface import Completed, RuntimeHost
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.hosts.local_survey import LocalSurvey
from pdctl.runtime.hosts.survey import Binding, Dialled, HostFacts, Listener
from pdctl.topology import plan
from pdctl.topology.checkpoint import read_checkpoint
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.digests import DigestCache
from pdctl.topology.model import Host

PORTS = range(30_000, 32_700)
"""Above those of a plan, and below those that a system hands out for connections."""
PORTS_EACH = 60


def own_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans hand out ports that nobody but this process tries: what a fleet's hosts are said to
    listen on is not what this machine does."""
    at = os.getpid() * PORTS_EACH % len(PORTS)
    monkeypatch.setattr(plan, "FIRST_PORT", PORTS[at])
    monkeypatch.setattr(plan, "LAST_PORT", PORTS[at + PORTS_EACH - 1])


class FleetSurvey(LocalSurvey):
    """The local one, with the changes of its host."""

    def __init__(self, host: FleetHost, cache: DigestCache) -> None:
        super().__init__(host.name, cache=cache)
        self._host = host

    def facts(self) -> HostFacts:
        self._host.asked("facts")
        found = msgspec.structs.replace(super().facts(), boot=f"boot-{self._host.name}")
        return msgspec.structs.replace(found, **self._host.facts)

    def listeners(self) -> list[Listener]:
        return [Listener(port=port) for port in self._host.listening]

    def bindings(self, wanted: tuple[Binding, ...]) -> list[Diagnostic]:
        self._host.asked("bindings")
        self._host.bound += wanted
        real = (msgspec.structs.replace(b, address=self._host.real(b.address)) for b in wanted)
        return super().bindings(tuple(real))

    def answer(self, address: tuple[str, int], token: str, **options: Any) -> None:
        self._host.asked("answer")
        self._host.encrypted = options["encrypt"]
        super().answer(self._host.real(address), token, **options)

    def dial(
        self, address: tuple[str, int], token: str, *, timeout_s: float, **options: Any
    ) -> Dialled:
        self._host.asked("dial")
        self._host.dialled.append(address)
        if self._host.walled or address[1] in self._host.closed_ports:
            return Dialled(error=f"no answer within {timeout_s:g} s", resolved=address[0])
        return super().dial(self._host.real(address), token, timeout_s=timeout_s, **options)


class FleetHost(LocalHost):
    def __init__(self, name: str, cache: DigestCache) -> None:
        super().__init__(name)
        self.survey: FleetSurvey = FleetSurvey(self, cache)
        self.facts: dict[str, Any] = {}
        self.lost_at: str | None = None
        """The question at which the connection is away."""
        self.walled = False
        """Nothing that it dials answers."""
        self.closed_ports: frozenset[int] = frozenset()
        """Nor what it dials at these."""
        self.names: dict[str, str] = {}
        """Address in the topology → the real one."""
        self.routes: dict[str, HostError] = {}
        self.listening: list[int] = []
        self.questions: list[str] = []
        self.bound: list[Binding] = []
        self.dialled: list[tuple[str, int]] = []
        self.encrypted: bool | None = None
        """Whether its latest answer was under TLS."""
        self.clock_offset_s: float | None = None
        self.round_trip_s: float | None = None

    def asked(self, question: str) -> None:
        self.questions.append(question)
        if self.lost_at == question:
            raise HostError(f'host "{self.name}": it is away', hint="switch it on")

    def real(self, address: tuple[str, int]) -> tuple[str, int]:
        return self.names.get(address[0], address[0]), address[1]

    def run(self, command: Command, *, stdin: bytes = b"", timeout_s: float) -> Completed:
        self.asked("run")
        checkpoint, _ = read_checkpoint(Path(command.argv[-1]).expanduser())
        assert checkpoint is not None
        probe = Probe(
            engine_version="0.32.2",
            pdctl_version=__version__,
            python_version="3.11.9",
            effective={
                "attention": msgspec.to_builtins(checkpoint.attention),
                "positions": {"rope_theta": checkpoint.rope_theta},
            },
        )
        return Completed(returncode=0, stdout=msgspec.json.encode(probe), stderr=b"")

    def route(self, declared: Host) -> HostFacts:
        self.asked(f"route {declared.name}")
        if declared.name in self.routes:
            raise self.routes[declared.name]
        return self.survey.facts()


class Fleet:
    """The hosts of one test; `reach` is what validation takes."""

    def __init__(self, folder: Path, *names: str) -> None:
        cache = DigestCache(folder / "cache")
        self.hosts = {name: FleetHost(name, cache) for name in names}
        self.closed = 0

    def __getitem__(self, name: str) -> FleetHost:
        return self.hosts[name]

    @contextmanager
    def reach(self, declared: Mapping[str, Host]) -> Iterator[Mapping[str, RuntimeHost]]:
        try:
            yield self.hosts
        finally:
            self.closed += 1

    def each(self, change: Callable[[FleetHost], object]) -> None:
        for host in self.hosts.values():
            change(host)

    def listening(self) -> list[int]:
        """Ports of dialled addresses that still answer."""
        return [
            port
            for host in self.hosts.values()
            for name, port in host.dialled
            if _answers(host.real((name, port)))
        ]


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=2).close()
    except OSError:
        return False
    return True


def own_address(family: socket.AddressFamily = socket.AF_INET) -> str | None:
    """This machine's own address beyond loopback; None where it has none."""
    far = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.77"
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))  # sends nothing: only the route is looked up
            return str(probe.getsockname()[0])
    except OSError:
        return None
