"""`pdctl logs`: what replicas, router and agents wrote, running or not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer

from pdctl.cli.arguments import Cluster, ProcessNames
from pdctl.cli.launch_view import Prefixes
from pdctl.errors import UsageError
from pdctl.runtime.logs import Selection, follow, parse_pattern, parse_since, read, sizes
from pdctl.runtime.state import StateDir, resolve


def logs(
    topology: Cluster,
    replicas: ProcessNames = None,
    keep_on: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, help="At most so many lines of each.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Since a time, or for so long: 10m, 2h, 2026-01-31T12:00.")
    ] = None,
    grep: Annotated[
        str | None, typer.Option(help="Only lines in which this regular expression is found.")
    ] = None,
) -> None:
    """Show logs, each line behind its replica's name. They stay after `down`, until the next
    `up` of that name."""
    pattern = parse_pattern(grep) if grep is not None else None
    selection = Selection(
        tail=tail, since=parse_since(since) if since is not None else None, pattern=pattern
    )
    wanted = _chosen(resolve(topology), replicas or [])
    prefixes = Prefixes(list(wanted))
    ends = sizes(wanted)
    for line in read(wanted, selection, ends):
        prefixes.show(line.name, line.text)
    if keep_on:
        anyio.run(partial(_follow, wanted, ends, prefixes, pattern))


def _chosen(state: StateDir, names: list[str]) -> dict[str, Path]:
    present = {path.stem: path for path in sorted(state.logs.glob("*.log"))}
    record = state.read()
    if record is not None:
        known = [r.name for r in record.plan.replicas] + ["router"]
        present = {**{name: state.log(name) for name in known}, **present}
    if not present:
        raise UsageError(f'cluster "{state.path.name}" has no logs', hint="`pdctl up` launches it")
    unknown = [name for name in names if name not in present]
    if unknown:
        raise UsageError(
            f'there is no log of "{unknown[0]}"', hint=f"there is {', '.join(present)}"
        )
    return {name: present[name] for name in names} if names else present


async def _follow(
    logs: Mapping[str, Path],
    starts: Mapping[str, int],
    prefixes: Prefixes,
    pattern: re.Pattern[str] | None,
) -> None:
    async for line in follow(logs, pattern=pattern, starts=starts):
        prefixes.show(line.name, line.text)
