"""Finds the running cluster that a sweep is to measure."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pdctl.errors import ClusterError, UsageError
from pdctl.runtime.cluster.state import resolve
from pdctl.topology.model import Topology
from pdctl.topology.plan import Plan


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A running cluster, as a sweep needs to know it."""

    plan: Plan
    topology: Topology
    """What runs, as it was declared."""
    url: str
    """The router's, without a slash at the end."""
    api_key: str | None = None
    local_hosts: frozenset[str] = frozenset()
    """Names of the hosts that are this machine."""

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}


def running(name: str) -> Target:
    """The cluster of that name, or of the topology at that path.

    Raises:
        TopologyError: it names neither.
        ClusterError: that cluster is not running.
    """
    state = resolve(name)
    record = state.read()
    if record is None or record.phase != "running":
        phase = "is not running" if record is None else f"is {record.phase}"
        raise ClusterError(
            f'cluster "{state.path.name}" {phase}', hint=f"start it with: pdctl up {name}"
        )
    hosts = record.topology.hosts.values()
    return Target(
        plan=record.plan,
        topology=record.topology,
        url=(record.url or router_url(record.plan.router_bind)).rstrip("/"),
        api_key=state.read_api_key(),
        local_hosts=frozenset(host.name for host in hosts if host.ssh is None),
    )


def router_url(bind: str) -> str:
    """Where a router that listens on `bind` ("host:port") is reached from its own host."""
    host, _, port = bind.rpartition(":")
    bare = host.strip("[]")
    reached = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(bare, bare)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def tokenizer_directory(target: Target) -> Path:
    """A replica's checkpoint on this machine; UsageError where none is here."""
    for replica in target.plan.replicas:
        directory = Path(replica.model).expanduser()
        if replica.host in target.local_hosts and (directory / "tokenizer.json").is_file():
            return directory
    raise UsageError(
        "no replica's checkpoint is on this machine, so prompts cannot be counted",
        hint="name a copy of it with --tokenizer DIR",
    )
