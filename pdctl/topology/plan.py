"""What `up` would do: ports, pairs and budgets, derived from a topology and its contract.

Pure: what is taken on a host comes in as `busy`, what goes out is data.
"""

from __future__ import annotations

import msgspec

from pdctl.topology.model import ComputeDtype, Dtype, Engine, Replica, Role, Transport


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
    data_host: str = "127.0.0.1"
    """Address that other hosts dial; loopback where every peer is on the same host."""
    data_port: int | None = None
    """None for a replica that never sends (decode)."""
    side_port: int | None = None
    declared: Replica
    """As written in the file: python, env, devices, engine_config."""


class PairPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill and one decode replica that exchange KV, and how."""

    prefill: str
    decode: str
    transport: Transport
    reason: str
    """Why this transport, in words that `plan` prints."""

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
    router_host: str
    router_bind: str
    agent_ports: dict[str, int]
    """Host name → its agent's port, unique in the cluster."""
    replicas: tuple[ReplicaPlan, ...]
    pairs: tuple[PairPlan, ...]

    def replica(self, name: str) -> ReplicaPlan:
        """The replica of that name; KeyError where the plan has none."""
        for replica in self.replicas:
            if replica.name == name:
                return replica
        raise KeyError(name)
