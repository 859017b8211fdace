"""Rules about `transport = "native"`: the engines' own handoffs, which pdctl starts and drives
but does not carry.

vLLM's NixlConnector and SGLang's NIXL backend move the KV cache between replicas of one engine.
Neither knows tickets: what they listen on is open to whoever reaches it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator

from pdctl.topology.addresses import is_loopback, one_machine
from pdctl.topology.diagnostics import Diagnostic, Severity
from pdctl.topology.model import Engine, OnFailure, Replica, Role, Topology, Transport

OWN = {Engine.VLLM: "vLLM's own NixlConnector", Engine.SGLANG: "SGLang's own NIXL backend"}
"""The handoff that each engine brings along; mlx has none."""

MOVES = frozenset({Role.PREFILL, Role.DECODE})


def is_native(topology: Topology, replica: Replica) -> bool:
    """Whether its engine's own handoff moves this replica's KV cache."""
    return topology.handoff.transport is Transport.NATIVE and replica.role in MOVES


def has_side_port(topology: Topology, replica: Replica) -> bool:
    """vLLM's connector listens in both roles, SGLang's bootstrap server on prefill alone."""
    if not is_native(topology, replica):
        return False
    return replica.engine is Engine.VLLM or replica.role is Role.PREFILL


def rules(topology: Topology) -> Iterable[Diagnostic]:
    """What native can't do, and what it leaves open."""
    if topology.handoff.transport is not Transport.NATIVE:
        return
    yield from _engines(topology)
    yield from _settings(topology)
    yield from _ends(topology)


def _engines(topology: Topology) -> Iterator[Diagnostic]:
    for p in topology.replicas:
        for d in topology.replicas:
            if (p.role, d.role) != (Role.PREFILL, Role.DECODE):
                continue
            lacking = next((r for r in (p, d) if r.engine not in OWN), None)
            if lacking is None and p.engine is d.engine:
                continue
            if lacking is not None:
                why = f"{lacking.engine} has no handoff of its own ({lacking.name})"
            else:
                why = f"{p.engine} and {d.engine} have no handoff of their own in common"
            yield Diagnostic(
                code="topology.native_engines",
                summary=f'pair "{p.name}" → "{d.name}": transport "native" is impossible: {why}',
                detail="every prefill replica is paired with every decode replica, and one can't "
                "be in native and in other pairs at once",
                field="handoff.transport",
                hint='write transport = "auto", or give each engine a topology of its own',
            )


def _settings(topology: Topology) -> Iterator[Diagnostic]:
    handoff = topology.handoff
    if handoff.encrypt:
        yield Diagnostic(
            code="topology.native_encrypt",
            summary='handoff: encrypt = true is impossible with transport = "native": the '
            "engines' own handoffs have no TLS",
            field="handoff.encrypt",
            hint='write transport = "tcp"',
        )
    if handoff.on_failure is OnFailure.RECOMPUTE:
        yield Diagnostic(
            code="topology.native_recompute",
            summary='handoff: on_failure = "recompute" is impossible with transport = "native": '
            "an engine's own handoff that fails is either an error or recomputed without a word",
            field="handoff.on_failure",
            hint='write on_failure = "error"',
        )
    if handoff.buffer_bytes is not None:
        yield Diagnostic(
            severity=Severity.WARNING,
            code="topology.unused_buffer",
            summary='handoff: buffer_bytes is unused with transport = "native": the KV cache '
            "stays in the engines' own blocks",
            field="handoff.buffer_bytes",
            hint="leave buffer_bytes away",
        )


def _ends(topology: Topology) -> Iterator[Diagnostic]:
    """Both ends of a far pair are dialled, and listen at their address without asking who comes."""
    for i, replica in enumerate(topology.replicas):
        far = _far_peer(topology, replica)
        if far is None or replica.host not in topology.hosts:
            continue
        host = topology.hosts[replica.host]
        address = replica.address or host.address
        field = f"replicas[{i}].address" if replica.address else f"hosts.{host.name}.address"
        if address is None or is_loopback(address):
            if replica.role is Role.DECODE and not (
                address and one_machine(host, topology.hosts[far.host])
            ):
                yield _undialled(replica, far, address, f"replicas[{i}].address")
            continue
        if not _is_ip(address):
            yield Diagnostic(
                code="topology.native_address",
                summary=f'replica "{replica.name}": its address {address} is a name, and '
                f"{OWN.get(replica.engine, replica.engine)} listens at IP addresses alone",
                field=field,
                replica=replica.name,
                hint="write the IP address that the name stands for",
            )
        yield _open(replica, address, field)


def _undialled(replica: Replica, far: Replica, address: str | None, field: str) -> Diagnostic:
    state = "has no address to dial" if address is None else f"its address {address} is loopback"
    return Diagnostic(
        code="topology.no_address" if address is None else "topology.loopback_address",
        summary=f'replica "{replica.name}": prefill replica "{far.name}" is on another host, both '
        f"ends of a native pair dial each other, and this one {state}",
        field=field,
        replica=replica.name,
        hint=f'add address = "…" under [hosts.{replica.host}]',
    )


def _open(replica: Replica, address: str, field: str) -> Diagnostic:
    return Diagnostic(
        severity=Severity.WARNING,
        code="topology.native_open",
        summary=f'replica "{replica.name}": at {address}, '
        f"{OWN.get(replica.engine, replica.engine)} lets whoever reaches it read or write its KV "
        "cache",
        detail="besides side_port it uses ports that UCX and the engine choose; UCX_TCP_PORT_RANGE "
        "in the replica's env narrows UCX's",
        field=field,
        replica=replica.name,
        hint="keep the address to a network whose hosts you trust, or write "
        'transport = "tcp" with encrypt = true',
    )


def _far_peer(topology: Topology, replica: Replica) -> Replica | None:
    return next(
        (
            other
            for other in topology.replicas
            if {replica.role, other.role} == MOVES
            and other.host != replica.host
            and other.host in topology.hosts
        ),
        None,
    )


def _is_ip(address: str) -> bool:
    try:
        ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return True
