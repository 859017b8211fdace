"""`python -m pdctl.engines.sglang.server`: SGLang's HTTP server, as a replica of a cluster.

It takes that server's own options. The plug-in, in the scheduler's process, attaches to the
agent (`joining.py`); this process holds no secret.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from pdctl.engines.channel import REPLICA_ENV, SOCKET_ENV
from pdctl.engines.program import check_started_by_agent, serve

SERVER_MODULE = "sglang.launch_server"


def keep_to_itself(environment: MutableMapping[str, str]) -> None:
    """torch's process groups meet in a file instead of a store that listens on every interface
    (R60), and the sockets between SGLang's processes lie beside the agent's, in a directory of
    this user's alone that goes with the cluster."""
    place = Path(environment[SOCKET_ENV]).parent
    meeting = place / f"{environment[REPLICA_ENV]}-{os.getpid()}.store"
    environment.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", f"file://{meeting}")
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("TMPDIR", str(place))
    tempfile.tempdir = None


def main() -> None:
    check_started_by_agent()
    keep_to_itself(os.environ)
    serve(SERVER_MODULE, "SGLang")


if __name__ == "__main__":
    main()
