"""`python -m pdctl.engines.vllm.server`: vLLM's OpenAI server, as a replica of a cluster.

It takes that server's own options. `vllm serve` itself needs metadata that the CPU builds
lack; its module is what that command runs. The connector, in the worker's process, attaches to
the agent (`session.py`); this process holds no secret.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import MutableMapping

from pdctl.engines.channel import REPLICA_ENV, SOCKET_ENV
from pdctl.errors import LaunchError, UsageError

SERVER_MODULE = "vllm.entrypoints.openai.api_server"


def keep_to_loopback(environment: MutableMapping[str, str]) -> None:
    """R60: of torch's process groups, gloo's listen for anybody at the address that the host's
    name leads to, often the network's; those of one process need no more than loopback."""
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")


def main() -> None:
    missing = [name for name in (SOCKET_ENV, REPLICA_ENV) if name not in os.environ]
    if missing:
        sys.stderr.write(
            f"error: {missing[0]} is not set\n\nhint: engines are started by `pdctl up`\n"
        )
        sys.exit(UsageError.exit_code)
    # a model's "~" is this host's home
    sys.argv = [os.path.expanduser(argument) for argument in sys.argv]
    keep_to_loopback(os.environ)
    try:
        serve()
    except (OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"error: vLLM ended: {type(error).__name__}: {error}\n")
        sys.exit(LaunchError.exit_code)


def serve() -> None:
    """Until a signal. The module is run as the program that it is, so that what it does before
    it serves, which differs from version to version, is its own affair."""
    runpy.run_module(SERVER_MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
