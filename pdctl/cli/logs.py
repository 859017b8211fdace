"""`pdctl logs`: what replicas, router and agents wrote, running or not."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, TypeVar

import anyio
import typer

from pdctl.cli import render
from pdctl.cli.arguments import Cluster, ProcessNames
from pdctl.cli.launch_view import Prefixes
from pdctl.errors import UsageError
from pdctl.runtime.cluster.keeper import hosts_of
from pdctl.runtime.cluster.log_places import cluster_logs, local_logs, log_hosts
from pdctl.runtime.cluster.logs import (
    Log,
    Selection,
    follow,
    parse_pattern,
    parse_since,
    read,
    sizes,
)
from pdctl.runtime.cluster.state import StateDir, resolve

T = TypeVar("T")


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
    """Show logs, each line behind its replica's name, from whatever host they lie on. They stay
    after `down`, until the next `up` of that name."""
    pattern = parse_pattern(grep) if grep is not None else None
    selection = Selection(
        tail=tail, since=parse_since(since) if since is not None else None, pattern=pattern
    )
    state = resolve(topology)
    record = state.read() or state.read_ended()
    with contextlib.ExitStack() as stack:
        if record is None:
            wanted = _chosen(state, local_logs(state), replicas or [])
        else:
            hosts = stack.enter_context(hosts_of(record))
            _chosen(state, {**log_hosts(record), **local_logs(state)}, replicas or [])
            wanted = cluster_logs(state, record, hosts, replicas, missing=_tell_missing)
        _show(wanted, selection, keep_on=keep_on)


def _show(wanted: Mapping[str, Log], selection: Selection, *, keep_on: bool) -> None:
    prefixes = Prefixes(list(wanted))
    ends = sizes(wanted)
    for line in read(wanted, selection, ends):
        prefixes.show(line.name, line.text)
    if keep_on:
        anyio.run(partial(_follow, wanted, ends, prefixes, selection.pattern))


def _chosen(state: StateDir, present: Mapping[str, T], names: list[str]) -> dict[str, T]:
    if not present:
        raise UsageError(f'cluster "{state.path.name}" has no logs', hint="`pdctl up` launches it")
    unknown = [name for name in names if name not in present]
    if unknown:
        raise UsageError(
            f'there is no log of "{unknown[0]}"', hint=f"there is {', '.join(present)}"
        )
    return {name: present[name] for name in names or present}


def _tell_missing(why: str) -> None:
    render.stderr().print(f"logs left out: {why}", soft_wrap=True)


async def _follow(
    logs: Mapping[str, Log],
    starts: Mapping[str, int],
    prefixes: Prefixes,
    pattern: re.Pattern[str] | None,
) -> None:
    def missing(name: str, why: str) -> None:
        render.stderr().print(f"{name}: {why}", soft_wrap=True)

    async for line in follow(logs, pattern=pattern, starts=starts, missing=missing):
        prefixes.show(line.name, line.text)
