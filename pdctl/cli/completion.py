"""What a shell offers for an argument. Nothing here may fail or print: no answer is one too.

Modules are imported where they are used: a shell asks at every press of the key.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import typer


def clusters(incomplete: str) -> list[str]:
    """Clusters that were launched here, and topology files."""
    return [*_running(incomplete), *files(incomplete)]


def files(incomplete: str) -> list[str]:
    """TOML files, and folders to look into."""
    found: list[str] = []
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        typed = Path(incomplete)
        folder = typed if incomplete.endswith("/") else typed.parent
        start = "" if incomplete.endswith("/") else typed.name
        for path in sorted(folder.expanduser().iterdir()):
            shown = str(folder / path.name)
            if path.name.startswith(start) and (start or not path.name.startswith(".")):
                if path.is_dir():
                    found.append(f"{shown}/")
                elif path.suffix == ".toml":
                    found.append(shown)
    return found


def _running(incomplete: str) -> list[str]:
    from pdctl.errors import PdctlError
    from pdctl.runtime.cluster import state

    with contextlib.suppress(PdctlError, OSError):
        names = [found.path.name for found in state.clusters()]
        return [name for name in names if name.startswith(incomplete)]
    return []


def replicas(context: typer.Context, incomplete: str) -> list[str]:
    """Replicas of the topology that stands before it on the line."""
    return _names(context, incomplete, ())


def processes(context: typer.Context, incomplete: str) -> list[str]:
    """Replicas, and the router."""
    return _names(context, incomplete, ("router",))


def starters(incomplete: str) -> list[str]:
    from pdctl.cli.init import starter_names

    return [name for name in starter_names() if name.startswith(incomplete)]


def _names(context: typer.Context, incomplete: str, also: tuple[str, ...]) -> list[str]:
    target = context.params.get("topology")
    if not target:
        return []
    names = (*_declared(str(target)), *also)
    taken = context.params.get("replicas") or ()
    return [name for name in names if name.startswith(incomplete) and name not in taken]


def _declared(target: str) -> tuple[str, ...]:
    """As they run; where nothing runs, as the file declares them."""
    from pdctl.errors import PdctlError
    from pdctl.runtime.cluster import state
    from pdctl.topology.load import read

    with contextlib.suppress(PdctlError, OSError):
        record = state.resolve(target).read()
        if record is not None:
            return tuple(replica.name for replica in record.plan.replicas)
    with contextlib.suppress(PdctlError, OSError):
        topology = read(Path(target).expanduser()).topology
        if topology is not None:
            return tuple(replica.name for replica in topology.replicas)
    return ()
