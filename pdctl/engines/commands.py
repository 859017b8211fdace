"""What every engine's adapter says of the process that it wants on a host. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from pdctl.topology.model import Host, Replica


def python_of(replica: Replica, host: Host) -> str:
    """The interpreter that has the engine: the replica's, its host's, or this process's own
    where the host is this machine."""
    return replica.python or host.python or (sys.executable if host.ssh is None else "python3")


def environment_of(replica: Replica, host: Host, engines: Mapping[str, str]) -> dict[str, str]:
    """The engine's own variables, which a host may override, and a replica both."""
    return {**engines, **host.env, **replica.env}
