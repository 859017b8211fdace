"""Where the logs of a cluster lie: on each host, in its agent's state directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pdctl.errors import HostError
from pdctl.runtime.cluster.logs import Log
from pdctl.runtime.cluster.placement import placement
from pdctl.runtime.cluster.state import ClusterRecord, StateDir
from pdctl.runtime.hosts.interface import RuntimeHost
from pdctl.runtime.hosts.local import LocalHost


def local_logs(state: StateDir) -> dict[str, Log]:
    """The logs that lie on this machine, whether their cluster runs or not."""
    host = LocalHost()
    return {p.stem: Log(host=host, path=str(p)) for p in sorted(state.logs.glob("*.log"))}


def log_hosts(record: ClusterRecord) -> dict[str, str]:
    """Name of every log of a running cluster → the host on which it lies."""
    plan = record.plan
    found = {replica.name: replica.host for replica in plan.replicas}
    found["router"] = plan.router_host
    found |= {store.name: store.host for store in plan.stores}
    return found | {f"agent-{host}": host for host in plan.agent_ports}


def cluster_logs(
    state: StateDir,
    record: ClusterRecord,
    hosts: Mapping[str, RuntimeHost],
    names: list[str] | None = None,
    *,
    missing: Callable[[str], None],
) -> dict[str, Log]:
    """The logs of a running cluster, on every host; `names` chooses among them.

    Args:
        missing: told, once per host, why its logs are left out.
    """
    wanted = log_hosts(record)
    if names:
        wanted = {name: wanted[name] for name in names if name in wanted}
    found: dict[str, Log] = {}
    for host in dict.fromkeys(wanted.values()):
        try:
            place = placement(hosts[host], record, state)
        except HostError as error:
            missing(error.message)
            continue
        far = record.topology.hosts[host].ssh is not None
        found |= {
            name: Log(host=hosts[host], path=place.log(name), far=far)
            for name, where in wanted.items()
            if where == host
        }
    return {name: found[name] for name in wanted if name in found}
