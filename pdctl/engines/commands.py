"""What every engine's adapter says of the process that it wants on a host. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from pdctl.topology.addresses import is_loopback
from pdctl.topology.model import Host, Replica
from pdctl.topology.plan import ReplicaPlan


def python_of(replica: Replica, host: Host) -> str:
    """The interpreter that has the engine: the replica's, its host's, or this process's own
    where the host is this machine."""
    return replica.python or host.python or (sys.executable if host.ssh is None else "python3")


def environment_of(replica: Replica, host: Host, engines: Mapping[str, str]) -> dict[str, str]:
    """The engine's own variables, which a host may override, and a replica both."""
    return {**engines, **host.env, **replica.env}


def ucx_environment(replica: ReplicaPlan) -> dict[str, str]:
    """What keeps UCX, which carries an engine's own handoff, to loopback where every peer is on
    this machine; else it listens on every interface."""
    return {"UCX_NET_DEVICES": "lo"} if is_loopback(replica.data_host) else {}
