"""How an engine's probe answers: it collects problems, and prints one JSON `Probe`. In-engine."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import msgspec

from pdctl import __version__
from pdctl.engines.interface import Probe
from pdctl.handoff.transport import nixl

MOST_SAID = 300
"""Characters kept of what a foreign library raises."""


class Findings:
    """What is found out of one checkpoint, as it goes: what stands here when the engine's
    library raises stays."""

    def __init__(self) -> None:
        self.effective: dict[str, Any] | None = None
        self.problems: list[str] = []


def probed(engine: str, engine_version: str, look: Callable[[Findings], None]) -> Probe:
    """What `look` finds; whatever it raises is one more problem.

    Args:
        engine: as a user knows it.
    """
    found = Findings()
    try:
        look(found)
    # A foreign library meets a foreign file: whatever it raises is the answer.
    except Exception as error:
        said = " ".join(str(error).split())[:MOST_SAID]
        found.problems.append(
            f"{engine} cannot read this checkpoint: {type(error).__name__}: {said}"
        )
    return Probe(
        engine_version=engine_version,
        pdctl_version=__version__,
        python_version=platform.python_version(),
        effective=found.effective,
        has_nixl=find_spec("nixl") is not None,
        nixl_problem=nixl.problem(),
        problems=tuple(found.problems),
    )


def answer(make: Callable[[], Probe]) -> None:
    """Prints the probe. stdout is its alone: what libraries write there goes to stderr."""
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        stdout.write(msgspec.json.encode(make()).decode() + "\n")
