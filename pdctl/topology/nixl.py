"""Rules about `transport = "nixl"`: pages that the decode replica reads out of the prefill
replica's memory, through UCX. They lie on the devices that the file names for both replicas, or in
host memory where it names none.

Requests, tickets and checksums stay on the data plane's connection; the bytes of pages do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdctl.topology.diagnostics import Diagnostic, Severity
from pdctl.topology.model import Engine, Replica, Role, Topology, Transport

READS = frozenset({Engine.VLLM, Engine.SGLANG})
"""Engines whose pages can be read so."""


def on_device(replica: Replica) -> bool:
    """Its KV lies on an NVIDIA device, as the file has it."""
    return replica.engine in READS and bool(replica.devices)


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
        if READS.issuperset((p.engine, d.engine)) and on_device(p) is not on_device(d):
            yield _mixed(p, d)
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


def _mixed(p: Replica, d: Replica) -> Diagnostic:
    near, far = (p, d) if on_device(p) else (d, p)
    return Diagnostic(
        code="topology.nixl_memories",
        summary=f'pair "{p.name}" → "{d.name}": transport "nixl" is impossible: {near.name} keeps '
        f"KV on a device, and {far.name} names none",
        detail="pages are read out of memory of the same kind; between a device and host memory "
        "NIXL is slower than TCP",
        field="handoff.transport",
        hint='write transport = "auto", or name the devices of both replicas',
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
