"""Rules about `transport = "nixl"`: pages that the decode replica reads out of the prefill
replica's memory, through UCX.

Requests, tickets and checksums stay on the data plane's connection; the bytes of pages do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdctl.topology.diagnostics import Diagnostic, Severity
from pdctl.topology.model import Engine, Replica, Role, Topology, Transport

READS = frozenset({Engine.VLLM, Engine.SGLANG})
"""Engines whose pages can be read so."""


def rules(topology: Topology) -> Iterable[Diagnostic]:
    """What NIXL can't do, and what it leaves open."""
    if topology.handoff.transport is not Transport.NIXL:
        return
    yield from _engines(topology)
    if topology.handoff.encrypt:
        yield Diagnostic(
            code="topology.nixl_encrypt",
            summary='handoff: encrypt = true is impossible with transport = "nixl": UCX has no TLS',
            field="handoff.encrypt",
            hint='write transport = "tcp"',
        )
    for p, d in _pairs(topology):
        if p.host != d.host:
            yield _open(p, d)


def _pairs(topology: Topology) -> Iterator[tuple[Replica, Replica]]:
    for p in topology.replicas:
        for d in topology.replicas:
            if (p.role, d.role) == (Role.PREFILL, Role.DECODE):
                yield p, d


def _engines(topology: Topology) -> Iterator[Diagnostic]:
    for p, d in _pairs(topology):
        end = next((r for r in (p, d) if r.engine not in READS), None)
        if end is not None:
            yield Diagnostic(
                code="topology.nixl_engines",
                summary=f'pair "{p.name}" → "{d.name}": transport "nixl" is impossible: '
                f"{end.engine} can't do it ({end.name})",
                field="handoff.transport",
                hint='write transport = "auto"',
            )


def _open(p: Replica, d: Replica) -> Diagnostic:
    return Diagnostic(
        severity=Severity.WARNING,
        code="topology.nixl_open",
        summary=f'pair "{p.name}" → "{d.name}": between hosts, UCX reads pages over connections '
        "that ask for no key",
        detail="it listens on ports that it chooses; UCX_TCP_PORT_RANGE and UCX_NET_DEVICES in the "
        "replicas' env narrow them",
        field="handoff.transport",
        hint="keep the two hosts on a network that you trust, or write "
        'transport = "tcp" with encrypt = true',
    )
