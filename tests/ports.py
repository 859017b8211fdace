"""Ports for what tests start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

RANGE = range(10_000, 19_990)
"""Below those of a plan, and below those that a system hands out for connections: one of these
may be gone by the time that an engine has imported its modules."""


def free_port(run: int = 1) -> int:
    """A port of 127.0.0.1 that nothing listens on, as are the next ones, `run` in all.

    Raises AssertionError where 100 trials found none.
    """
    for port in random.Random().sample(RANGE, 100):
        with ExitStack() as held, suppress(OSError):
            for near in range(port, port + run):
                held.enter_context(socket.create_server(("127.0.0.1", near)))
            return port
    raise AssertionError(f"no {run} ports in a row are free")
