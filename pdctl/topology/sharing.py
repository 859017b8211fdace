"""Prefix KV shared between replicas: which hosts have a page store, where, and who
uses it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from pdctl.topology.addresses import is_loopback, one_machine
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import Role, Topology

LEAST_REPLICAS = 2
PREFIX = "store-"
"""Of a store's name among the processes of its host."""


class StorePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One host's page store."""

    host: str
    buffer_bytes: int
    data_host: str = "127.0.0.1"
    """Address that other hosts' stores dial."""
    data_port: int | None = None
    """None where no other host has a store."""

    @property
    def name(self) -> str:
        """As its agent, its log and messages call it."""
        return PREFIX + self.host


def ordinary_replicas(topology: Topology) -> int:
    return sum(r.role is Role.BOTH for r in topology.replicas)


def sharing_hosts(topology: Topology) -> tuple[str, ...]:
    """Hosts whose ordinary replicas share prefix KV, in the file's order; none where sharing is
    off."""
    if topology.sharing is None or ordinary_replicas(topology) < LEAST_REPLICAS:
        return ()
    return tuple(dict.fromkeys(r.host for r in topology.replicas if r.role is Role.BOTH))


def plan_stores(
    topology: Topology, assign: Callable[[int | None], int], kept: Iterable[StorePlan] = ()
) -> tuple[StorePlan, ...]:
    """A store for each sharing host.

    Args:
        assign: hands out a port, or confirms that one.
        kept: what runs now: a store keeps its port.
    """
    hosts = sharing_hosts(topology)
    before = {store.host: store.data_port for store in kept}
    found = []
    for name in hosts:
        port = assign(before.get(name)) if len(hosts) > 1 else None
        found.append(
            StorePlan(
                host=name,
                buffer_bytes=topology.sharing.buffer_bytes if topology.sharing else 0,
                data_host=topology.hosts[name].address or "127.0.0.1",
                data_port=port,
            )
        )
    return tuple(found)


def sharing_rules(topology: Topology) -> Iterable[Diagnostic]:
    """Stores of several hosts need addresses at which they are dialled; names that they take."""
    hosts = [topology.hosts[name] for name in sharing_hosts(topology) if name in topology.hosts]
    for host in hosts:
        far = next((other for other in hosts if not one_machine(host, other)), None)
        if far is None or (host.address is not None and not is_loopback(host.address)):
            continue
        what = "no address" if host.address is None else f"the loopback address {host.address}"
        yield Diagnostic(
            code="topology.no_address" if host.address is None else "topology.loopback_address",
            summary=f'host "{host.name}": it has {what}, and the page store of host '
            f'"{far.name}" has to dial it',
            field=f"hosts.{host.name}.address",
            hint=f'write address = "…" under [hosts.{host.name}], or leave [sharing] away',
        )
    for i, replica in enumerate(topology.replicas):
        if replica.name.startswith(PREFIX) and replica.name[len(PREFIX) :] in topology.hosts:
            yield Diagnostic(
                code="topology.reserved_name",
                summary=f'replica "{replica.name}": this name is taken by a host\'s page store',
                field=f"replicas[{i}].name",
                replica=replica.name,
                hint="give the replica another name",
            )
