"""SGLang's entry point into pdctl (`sglang.srt.plugins`), called in each of its processes.

In a process that no agent of pdctl started it does nothing, and imports nothing (R37).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from pdctl.engines.channel import REPLICA_ENV, RUN_ENV, SOCKET_ENV
from pdctl.errors import LaunchError


def register() -> None:
    """Adds pdctl's transfer backend and its hooks.

    SGLang logs what a plug-in raises and goes on without it: a replica that is not whole ends
    here instead.
    """
    if not started_by_agent(os.environ):
        return
    try:
        from pdctl.engines.sglang.hooks import add_backend, add_hooks

        add_backend()
        add_hooks()
    # whatever it is, nobody else would end this process
    except Exception as error:
        sys.stderr.write(f"error: pdctl's plug-in failed: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(LaunchError.exit_code)


def started_by_agent(environment: Mapping[str, str]) -> bool:
    return all(name in environment for name in (RUN_ENV, SOCKET_ENV, REPLICA_ENV))
