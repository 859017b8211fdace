"""What `up` would do: ports, pairs and budgets, derived from a topology and its contract.

Pure: what is taken on a host comes in as `busy`, what goes out is data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from pdctl.errors import HostError
from pdctl.topology.contract import Contract
from pdctl.topology.fields import split_address
from pdctl.topology.model import (
    ComputeDtype,
    Dtype,
    Engine,
    Handoff,
    OnFailure,
    Replica,
    Role,
    Topology,
    Transport,
)
from pdctl.topology.native import OWN, has_side_port, is_native
from pdctl.topology.nixl import on_device
from pdctl.topology.rules import declared_ports
from pdctl.topology.sharing import StorePlan, plan_stores


class ReplicaPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One replica with everything assigned."""

    name: str
    host: str
    engine: Engine
    role: Role
    model: str
    dtype: Dtype
    compute_dtype: ComputeDtype
    http_host: str = "127.0.0.1"
    http_port: int
    route_port: int | None = None
    """Near end, on the router's host, of the SSH forward to `http_port`; None where the
    replica runs on that host."""
    data_host: str = "127.0.0.1"
    """Address that other hosts dial; loopback where every peer is on the same host."""
    data_port: int | None = None
    """None for a replica that never sends (decode)."""
    side_port: int | None = None
    """Where an engine's own handoff meets its peers; None where it does not listen."""
    native: bool = False
    """Its engine's own handoff moves its KV cache."""
    declared: Replica
    """As written in the file: python, env, devices, engine_config."""

    @property
    def sender_port(self) -> int | None:
        """Where a prefill replica is dialled for its KV cache; None where it sends none."""
        return self.data_port or (self.side_port if self.role is Role.PREFILL else None)


class PairPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill and one decode replica that exchange KV, and how."""

    prefill: str
    decode: str
    transport: Transport
    reason: str
    """Why this transport, in words that `plan` prints."""
    on_device: bool = False
    """Pages are read out of one device's memory into another's; else they lie in host memory."""

    @property
    def path(self) -> str:
        return f"{self.prefill}>{self.decode}"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is derived before launch."""

    cluster: str
    model: str
    dtype: Dtype
    context_length: int
    contract_digest: str | None
    """None when planned offline, without reading any checkpoint."""
    token_kv_bytes: int | None
    page_bytes: int | None
    buffer_bytes: int | None
    timeout_s: float
    on_failure: OnFailure = OnFailure.ERROR
    router_host: str
    router_bind: str
    agent_ports: dict[str, int]
    """Host name → its agent's port, unique in the cluster."""
    replicas: tuple[ReplicaPlan, ...]
    pairs: tuple[PairPlan, ...]
    stores: tuple[StorePlan, ...] = ()
    """Empty where no prefix KV is shared."""

    def replica(self, name: str) -> ReplicaPlan:
        """The replica of that name; KeyError where the plan has none."""
        for replica in self.replicas:
            if replica.name == name:
                return replica
        raise KeyError(name)

    def transports(self, replica: str) -> dict[str, Transport]:
        """How the pages of each pair of that replica move, by its peer."""
        return {
            pair.decode if pair.prefill == replica else pair.prefill: pair.transport
            for pair in self.pairs
            if replica in (pair.prefill, pair.decode)
        }

    def on_device(self, replica: str) -> bool:
        """Whether pages of any of its pairs lie on its device."""
        return any(p.on_device for p in self.pairs if replica in (p.prefill, p.decode))

    def store(self, host: str) -> StorePlan | None:
        """A host's page store, where it has one."""
        return next((store for store in self.stores if store.host == host), None)

    def store_of(self, replica: ReplicaPlan) -> StorePlan | None:
        """The page store that a replica uses: that of its host. An engine's own handoff knows
        nothing of it."""
        return None if replica.native else self.store(replica.host)

    def ports(self, host: str) -> frozenset[int]:
        """Every port that something of the cluster listens on at this host."""
        found = {self.agent_ports.get(host, 0)}
        found |= {store.data_port or 0 for store in self.stores if store.host == host}
        if self.router_host == host:
            found.add(split_address(self.router_bind)[1])
        for replica in self.replicas:
            if replica.host == host:
                found |= {replica.http_port, replica.data_port or 0, replica.side_port or 0}
            elif self.router_host == host:
                found.add(replica.route_port or 0)
        return frozenset(found - {0})


FIRST_PORT, LAST_PORT = 20_000, 29_999
MIN_BUFFER_BYTES = 512 << 20


def derive(
    topology: Topology,
    contract: Contract | None = None,
    *,
    busy: Mapping[str, frozenset[int]] | None = None,
    kept: Plan | None = None,
    no_nixl: Mapping[str, str] | None = None,
) -> Plan:
    """Everything that `up` needs beyond the file; deterministic for equal arguments.

    Args:
        topology: one without errors.
        contract: the replicas' common contract; None when planned offline.
        busy: ports that something else listens on, per host; they are not assigned.
        kept: what runs now; a replica or an agent that stays on its host keeps its ports.
        no_nixl: replica → why NIXL can't be used in its environment, as far as that was asked.
    """
    ports = _Ports(topology, busy or {}, kept)
    hosts = dict.fromkeys([topology.router.host, *(r.host for r in topology.replicas)])
    before = kept.agent_ports if kept else {}
    agent_ports = {host: ports.assign(before.get(host)) for host in hosts}
    return Plan(
        cluster=topology.name,
        model=topology.model.name,
        dtype=topology.model.dtype,
        context_length=topology.model.context_length,
        contract_digest=contract.digest if contract else None,
        token_kv_bytes=contract.token_kv_bytes if contract else None,
        page_bytes=contract.page_bytes if contract else None,
        buffer_bytes=buffer_bytes(topology, contract),
        timeout_s=topology.handoff.timeout_s,
        on_failure=topology.handoff.on_failure,
        router_host=topology.router.host,
        router_bind=topology.router.bind,
        agent_ports=agent_ports,
        replicas=tuple(_replica(topology, r, ports) for r in topology.replicas),
        pairs=pairs(topology, no_nixl or {}),
        stores=plan_stores(topology, ports.assign, kept.stores if kept else ()),
    )


def buffer_bytes(topology: Topology, contract: Contract | None) -> int | None:
    """The page budget of each prefill replica: declared, else two whole contexts' pages and
    at least 512 MiB; None where that can't be known yet."""
    if topology.handoff.buffer_bytes is not None or contract is None:
        return topology.handoff.buffer_bytes
    pages = -(-topology.model.context_length // contract.page_tokens)
    return max(MIN_BUFFER_BYTES, 2 * pages * contract.page_bytes)


def pairs(topology: Topology, no_nixl: Mapping[str, str] | None = None) -> tuple[PairPlan, ...]:
    """Each prefill replica with each decode replica, in the file's order.

    Args:
        no_nixl: as `derive` takes it.
    """
    found = []
    for p in topology.replicas:
        for d in topology.replicas:
            if p.role is Role.PREFILL and d.role is Role.DECODE:
                transport, reason = resolve_transport(topology.handoff, p, d, no_nixl or {})
                if topology.handoff.encrypt and transport is Transport.TCP:
                    reason += ", encrypted (TLS 1.3)"
                found.append(
                    PairPlan(
                        prefill=p.name,
                        decode=d.name,
                        transport=transport,
                        reason=reason,
                        on_device=transport is Transport.NIXL and on_device(p) and on_device(d),
                    )
                )
    return tuple(found)


def resolve_transport(
    handoff: Handoff, prefill: Replica, decode: Replica, no_nixl: Mapping[str, str]
) -> tuple[Transport, str]:
    """The transport of one pair, and why."""
    declared = handoff.transport
    if declared is Transport.NATIVE:
        return declared, f"native: {OWN.get(prefill.engine, prefill.engine)}"
    if declared is Transport.NIXL:
        where = "device" if on_device(prefill) and on_device(decode) else "host"
        return declared, f"nixl: written in the file; {where} memory, read by the decode replica"
    if declared is not Transport.AUTO:
        return declared, f"{declared}: written in the file"
    obstacle = _obstacle(handoff, prefill, decode, no_nixl)
    if obstacle is not None:
        return Transport.TCP, f"auto → tcp: {obstacle}"
    return Transport.NIXL, "auto → nixl: device memory, read by the decode replica"


def _obstacle(
    handoff: Handoff, prefill: Replica, decode: Replica, no_nixl: Mapping[str, str]
) -> str | None:
    """What keeps a pair's pages from going from device to device where the file leaves it open."""
    ends = (prefill, decode)
    if Engine.MLX in (end.engine for end in ends):
        return "mlx has no GPU path"
    away = [end.name for end in ends if not on_device(end)]
    if away:
        both = len(away) == len(ends)
        return "pages lie in host memory" if both else f"{away[0]} names no device"
    if handoff.encrypt:
        return "encrypt = true, and UCX has no TLS"
    if prefill.host != decode.host:
        return 'between hosts NIXL asks for no key; transport = "nixl" takes it all the same'
    return next((f"{end.name}: {no_nixl[end.name]}" for end in ends if end.name in no_nixl), None)


def peers(topology: Topology, replica: Replica) -> tuple[Replica, ...]:
    """The replicas that exchange KV with this one."""
    other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(replica.role)
    return tuple(r for r in topology.replicas if r.role is other)


def _replica(topology: Topology, replica: Replica, ports: _Ports) -> ReplicaPlan:
    own = is_native(topology, replica)
    sends = replica.role is Role.PREFILL and not own
    http_port = ports.of(replica, "http_port")
    return ReplicaPlan(
        name=replica.name,
        host=replica.host,
        engine=replica.engine,
        role=replica.role,
        model=replica.model,
        dtype=topology.model.dtype,
        compute_dtype=replica.compute_dtype or ComputeDtype(topology.model.dtype),
        http_port=http_port,
        route_port=(
            None if replica.host == topology.router.host else ports.route(replica, http_port)
        ),
        data_host=_data_host(topology, replica),
        data_port=ports.of(replica, "data_port") if sends else None,
        side_port=(ports.of(replica, "side_port") if has_side_port(topology, replica) else None),
        native=own,
        declared=replica,
    )


def _data_host(topology: Topology, replica: Replica) -> str:
    if replica.address is not None:
        return replica.address
    host = topology.hosts[replica.host]
    if all(peer.host == replica.host for peer in peers(topology, replica)):
        return "127.0.0.1"
    return host.address or "127.0.0.1"


class _Ports:
    """Hands out ports from a start that the cluster's name fixes, each one once."""

    def __init__(
        self, topology: Topology, busy: Mapping[str, frozenset[int]], kept: Plan | None
    ) -> None:
        self._replicas = {(r.name, r.host): r for r in kept.replicas} if kept else {}
        self._declared = {port for _, port, *_ in declared_ports(topology)}
        self._taken = set().union(self._declared, *busy.values())
        if kept is not None:
            self._taken |= set(kept.agent_ports.values())
            self._taken |= {store.data_port or 0 for store in kept.stores}
            for r in kept.replicas:
                self._taken |= {r.http_port, r.data_port or 0, r.side_port or 0}
                self._taken |= {r.route_port or 0}
        span = LAST_PORT - FIRST_PORT + 1
        seed = hashlib.sha256(topology.name.encode()).digest()
        start = int.from_bytes(seed[:4]) % span
        self._candidates = (FIRST_PORT + (start + step) % span for step in range(span))

    def of(self, replica: Replica, field: str) -> int:
        """As declared, as it runs now on the same host, or the next one that is free."""
        before = self._replicas.get((replica.name, replica.host))
        return getattr(replica, field, None) or self.assign(getattr(before, field, None))

    def route(self, replica: Replica, http_port: int) -> int:
        """As it runs now while it leads to the same port; else the next one that is free."""
        before = self._replicas.get((replica.name, replica.host))
        same = before is not None and before.http_port == http_port
        return self.assign(before.route_port if before is not None and same else None)

    def assign(self, kept: int | None = None) -> int:
        if kept is not None and kept not in self._declared:
            return kept
        for port in self._candidates:
            if port not in self._taken:
                return port
        raise HostError(
            f"no port from {FIRST_PORT} to {LAST_PORT} is free",
            hint="stop what listens on them, or declare ports in the topology",
        )
