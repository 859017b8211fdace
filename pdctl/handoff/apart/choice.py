"""Whether an engine's data plane runs in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pdctl.errors import UsageError

PLACE_ENV = "PDCTL_DATA_PLANE"
"""Of a replica's environment: "apart" or "inside" its engine's process. For benches."""


def is_apart(environ: Mapping[str, str]) -> bool:
    """Apart, where the system has memory that two processes share by descriptor.

    Raises:
        UsageError: the environment asks for something else.
    """
    place = environ.get(PLACE_ENV, "apart")
    if place not in ("apart", "inside"):
        raise UsageError(
            f"{PLACE_ENV} is {place!r}",
            hint=f'write "apart" or "inside", or leave {PLACE_ENV} away',
        )
    return place == "apart" and hasattr(os, "memfd_create")
