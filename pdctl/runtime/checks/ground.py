"""What all checks of one validation share: the topology, the ways to its hosts, who watches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from pdctl.errors import HostError
from pdctl.runtime.checks.outcome import Watcher
from pdctl.runtime.hosts.interface import RuntimeHost
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import Replica, Topology
from pdctl.topology.plan import Plan

T = TypeVar("T")


class Interrupted(Exception):
    """Ends work on other threads after the validating one was interrupted."""


class Ground:
    """Asks hosts, all at once. A host that fails once is *lost*: it is told once, and asked
    nothing any more. Used by one thread; questions run on others.

    Args:
        hosts: may connect at first use.
        kept: this very cluster's plan, where it runs.
    """

    def __init__(
        self,
        topology: Topology,
        hosts: Mapping[str, RuntimeHost],
        watcher: Watcher,
        *,
        kept: Plan | None = None,
    ) -> None:
        self.topology = topology
        self.watcher = watcher
        self.kept = kept
        used = {topology.router.host, *(r.host for r in topology.replicas)}
        self.hosts = {name: hosts[name] for name in topology.hosts if name in used}
        self.lost: dict[str, HostError] = {}
        self._stopped = threading.Event()

    @property
    def reached(self) -> tuple[str, ...]:
        """Hosts in use that are not lost, in the file's order."""
        return tuple(name for name in self.hosts if name not in self.lost)

    def own_ports(self, host: str) -> frozenset[int]:
        """What this very cluster listens on there now; its number elsewhere is somebody else's."""
        return self.kept.ports(host) if self.kept is not None else frozenset()

    def is_far(self, name: str) -> bool:
        """False for a host that is not declared, too."""
        host = self.topology.hosts.get(name)
        return host is not None and host.ssh is not None

    def ask(
        self,
        step: str | None,
        question: Callable[[RuntimeHost], T],
        names: Iterable[str] | None = None,
    ) -> dict[str, T]:
        """Host → answer, in the file's order; without the hosts that are, or get, lost.

        Args:
            step: what the watcher is told per host.
            names: of hosts; None: all.
        """
        chosen = set(self.hosts if names is None else names)
        wanted = [name for name in self.reached if name in chosen]

        def one(name: str) -> T | HostError:
            if step is not None:
                self.watcher.host(name, step)
            try:
                return question(self.hosts[name])
            except HostError as error:
                return error

        answers = dict(zip(wanted, self.together(one, wanted), strict=True))
        for name, answer in answers.items():
            if isinstance(answer, HostError):
                self.lost[name] = answer
        return {n: a for n, a in answers.items() if not isinstance(a, HostError)}

    def together(self, function: Callable[[str], T], arguments: list[str]) -> list[T]:
        """One thread per argument. An interruption does not wait for them."""
        if not arguments:
            return []
        pool = ThreadPoolExecutor(len(arguments), thread_name_prefix="pdctl-check")
        try:
            answers = [pool.submit(function, argument) for argument in arguments]
            found = [answer.result() for answer in answers]
        except BaseException:
            self._stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        return found

    def progress(self, host: str, model_dir: str) -> Callable[[int, int], None]:
        """For hashing there: tells the watcher, and ends the work here when interrupted."""
        where = self.place(host, model_dir)
        ends = not self.is_far(host)

        def advance(done_bytes: int, total_bytes: int) -> None:
            if ends and self._stopped.is_set():
                raise Interrupted
            self.watcher.hashing(where, done_bytes, total_bytes)

        return advance

    def place(self, host: str, path: str) -> str:
        """`gpu1:/models/x`; the path alone on this machine."""
        return f"{host}:{path}" if self.is_far(host) else path

    def losses(self) -> list[Diagnostic]:
        """One diagnostic per lost host."""
        return [
            Diagnostic(
                code="host.unreachable",
                summary=self.lost[name].message,
                field=f"hosts.{name}",
                hint=self.lost[name].hint,
            )
            for name in self.hosts
            if name in self.lost
        ]

    def at_host(self, diagnostic: Diagnostic, name: str) -> Diagnostic:
        """Says on which host it is, where that is not this machine."""
        if not self.is_far(name):
            return diagnostic
        return msgspec.structs.replace(diagnostic, summary=f"{diagnostic.summary} (on {name})")

    def of_replica(self, diagnostic: Diagnostic, replica: Replica, field: str | None) -> Diagnostic:
        placed = msgspec.structs.replace(
            diagnostic,
            summary=f'replica "{replica.name}": {diagnostic.summary}',
            replica=replica.name,
            field=field,
        )
        return self.at_host(placed, replica.host)
