"""An engine's own server, run as a replica of a cluster."""

from __future__ import annotations

import os
import runpy
import sys

from pdctl.engines.channel import REPLICA_ENV, SOCKET_ENV
from pdctl.errors import LaunchError, UsageError


def check_started_by_agent() -> None:
    """Ends the process with a word on how engines are started, where nobody did."""
    missing = [name for name in (SOCKET_ENV, REPLICA_ENV) if name not in os.environ]
    if missing:
        sys.stderr.write(
            f"error: {missing[0]} is not set\n\nhint: engines are started by `pdctl up`\n"
        )
        sys.exit(UsageError.exit_code)


def serve(module: str, engine: str) -> None:
    """Until a signal. The module is run as the program that it is, so that what it does before
    it serves, which differs from version to version, is its own affair."""
    # a model's "~" is this host's home
    sys.argv = [os.path.expanduser(argument) for argument in sys.argv]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except (OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"error: {engine} ended: {type(error).__name__}: {error}\n")
        sys.exit(LaunchError.exit_code)
