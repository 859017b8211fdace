"""What a cluster's router measured, from wherever it keeps it."""

from __future__ import annotations

from pdctl.errors import HostError
from pdctl.runtime.cluster.state import StateDir
from pdctl.runtime.cost.record import Costs, decode
from pdctl.runtime.hosts.local import LocalHost
from pdctl.runtime.hosts.reach import Hosts
from pdctl.topology.model import Topology

MAX_BYTES = 4 << 20
"""Of the file: some hundred bytes per sample."""


def stored_costs(topology: Topology, *, offline: bool) -> Costs:
    """Empty where nothing was measured, or its host can't be asked.

    Args:
        offline: no other host is asked.
    """
    router = topology.hosts[topology.router.host]
    try:
        if router.ssh is None:
            own = str(StateDir.of(topology.name).costs)
            return decode(LocalHost(router.name).read(own, max_bytes=MAX_BYTES))
        if offline:
            return Costs()
        with Hosts({router.name: router}) as hosts:
            host = hosts[router.name]
            home = host.survey.facts().state_home
            path = f"{home}/{topology.name}/hosts/{router.name}/costs.json"
            return decode(host.read(path, max_bytes=MAX_BYTES))
    except HostError:
        return Costs()
