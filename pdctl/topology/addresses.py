"""Rules about who can reach whom, as far as the file tells."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator

from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import Host, Replica, Role, Topology


def addresses(topology: Topology) -> Iterable[Diagnostic]:
    """R59, U31: a sender on another host than its receiver needs an address to be dialled at,
    and loopback is none. A wildcard is refused where the field is read."""
    for i, p in enumerate(topology.replicas):
        host = topology.hosts.get(p.host)
        far = _far_receiver(topology, p) if host is not None else None
        if host is None or far is None:
            continue
        address = p.address or host.address
        field = f"replicas[{i}].address" if p.address else f"hosts.{p.host}.address"
        hint = f'add address = "…" under [hosts.{p.host}]'
        if address is None:
            yield Diagnostic(
                code="topology.no_address",
                summary=f'replica "{p.name}": decode replica "{far.name}" is on another host and '
                "has no address to dial",
                field=f"replicas[{i}].address",
                replica=p.name,
                hint=hint,
            )
        elif is_loopback(address):
            yield Diagnostic(
                code="topology.loopback_address",
                summary=f'replica "{p.name}": its address {address} is loopback, which decode '
                f'replica "{far.name}" on host "{far.host}" can\'t dial',
                field=field,
                replica=p.name,
                hint=f'write the address by which "{far.host}" reaches "{p.host}"',
            )


def _far_receiver(topology: Topology, sender: Replica) -> Replica | None:
    if sender.role is not Role.PREFILL:
        return None
    return next(
        (
            d
            for d in topology.replicas
            if d.role is Role.DECODE
            and d.host != sender.host
            and d.host in topology.hosts
            and not one_machine(topology.hosts[sender.host], topology.hosts[d.host])
        ),
        None,
    )


def one_machine(a: Host, b: Host) -> bool:
    """Hosts without SSH are this machine."""
    return a.ssh is None and b.ssh is None


def one_agent(topology: Topology) -> Iterable[Diagnostic]:
    """This machine is one host of a cluster, with one agent: a second name for it leads nowhere."""
    router = topology.hosts.get(topology.router.host)
    if router is None or router.ssh is not None:
        return
    for i, r in _here(topology, router):
        yield Diagnostic(
            code="topology.one_machine",
            summary=f'replica "{r.name}": its host "{r.host}" is this machine, and so is the '
            f'router\'s host "{router.name}": neither has an ssh destination',
            field=f"replicas[{i}].host",
            replica=r.name,
            hint=f"use one of the two names for both (a replica may have a python, env and "
            f'address of its own), or write ssh = "…" under [hosts.{r.host}]',
        )


def routes(topology: Topology) -> Iterable[Diagnostic]:
    """The keeper runs on the router's host and starts the other hosts' agents over SSH. From a
    remote one there is no way to a host that is only "this machine"."""
    router = topology.hosts.get(topology.router.host)
    if router is None or router.ssh is None:
        return
    for i, r in _here(topology, router):
        yield Diagnostic(
            code="topology.no_route",
            summary=f'replica "{r.name}": the router runs on host "{router.name}", which can\'t '
            f'reach host "{r.host}": that is the launching machine, and has no ssh destination',
            field=f"replicas[{i}].host",
            replica=r.name,
            hint=f'write ssh = "…" under [hosts.{r.host}] as "{router.name}" reaches it, or '
            "leave router.host away",
        )


def _here(topology: Topology, router: Host) -> Iterator[tuple[int, Replica]]:
    """The first replica, with its place in the file, of each host other than the router's that
    has no SSH."""
    told = {router.name}
    for i, r in enumerate(topology.replicas):
        host = topology.hosts.get(r.host)
        if host is not None and host.ssh is None and r.host not in told:
            told.add(r.host)
            yield i, r


def is_loopback(host: str) -> bool:
    """By what is written; names are not resolved."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.rstrip(".").lower() in ("localhost", "localhost.localdomain", "ip6-localhost")
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
