"""`pdctl up`: validate, launch, wait until every path has answered, stay or leave."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer

from pdctl.cli import render
from pdctl.cli.arguments import TopologyPath
from pdctl.cli.change_view import change, stands
from pdctl.cli.down import stop
from pdctl.cli.launch_view import Board, Prefixes, board
from pdctl.errors import ClusterError
from pdctl.runtime.checks.validation import Validation, validate
from pdctl.runtime.cluster import lock
from pdctl.runtime.cluster.logs import Line
from pdctl.runtime.cluster.state import ClusterRecord, StateDir, declared_name
from pdctl.runtime.launch.foreground import Session
from pdctl.runtime.launch.interruption import raising
from pdctl.runtime.launch.launching import prepare


def up(
    topology: TopologyPath,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once everything is ready.")
    ] = False,
    wait_timeout: Annotated[
        float, typer.Option(help="Seconds until everything must be ready.", min=0.001)
    ] = 1800.0,
) -> None:
    """Launch a cluster and wait until a real generation has gone through every path.

    In the foreground it shows the logs, and Ctrl-C takes everything down. Where the cluster runs
    already, the difference to its file is shown and applied, and nothing else is touched."""
    path = topology.expanduser()
    state = _state_of(path)
    with raising(), contextlib.ExitStack() as stack:
        stack.callback(state.prune)
        state.make()
        locked = stack.enter_context(contextlib.ExitStack())
        locked.enter_context(lock.held(state.lock, state.path.name))
        record = state.read()
        if record is not None and _is_up(state, record):
            change(state, record, path, wait_s=wait_timeout)
            return
        checked = _checked(path)
        if not checked.report.valid:
            raise typer.Exit(checked.report.exit_code)
        _launch(state, locked, path, checked, wait_timeout_s=wait_timeout, detach=detach)


def _is_up(state: StateDir, record: ClusterRecord) -> bool:
    """Whether there is a cluster to change; what is left of one that is not is cleared away.

    Raises:
        ClusterError: something of it can't be stopped, or its agent does not answer.
    """
    if record.phase != "running":
        what = "was left half launched or half stopped"
    elif anyio.run(partial(stands, state, record)):
        return True
    else:
        what = "does not run any more"
    say = render.stderr().print
    say(f'cluster "{record.cluster}" {what}: taking down what is left first', soft_wrap=True)
    stop(state, record)
    state.make()
    return False


def _state_of(path: Path) -> StateDir:
    """The cluster's state; where the file names none, validation says what is wrong."""
    try:
        return StateDir.of(declared_name(path))
    except Exception as error:
        report = _checked(path).report
        if report.valid:
            raise
        raise typer.Exit(report.exit_code) from error


def _checked(path: Path) -> Validation:
    with render.steps() as watcher:
        checked = validate(path, watcher=watcher)
    render.show_diagnostics(checked.report)
    return checked


def _launch(
    state: StateDir,
    locked: contextlib.ExitStack,
    path: Path,
    checked: Validation,
    *,
    wait_timeout_s: float,
    detach: bool,
) -> None:
    assert checked.plan is not None, "a valid report comes with a plan"
    names = [r.name for r in checked.plan.replicas]
    names += [store.name for store in checked.plan.stores]
    names += ["router", *(f"agent-{host}" for host in checked.plan.agent_ports)]
    prefixes = Prefixes(names)
    with board() as shown:
        session = Session(
            state,
            locked,
            shown.show,
            show=partial(_line, prefixes),
            ready=partial(_ready, shown, detach=detach),
            again=partial(shown.say, "still stopping; nothing may be left behind"),
        )
        run = partial(session.run, wait_timeout_s=wait_timeout_s, detach=detach)
        left = anyio.run(run, partial(prepare, state, path, checked, os.environ))
    if left:
        raise ClusterError(
            f"not everything could be stopped: {'; '.join(left)}",
            hint=f"try `pdctl down {state.path.name}`",
        )


def _line(prefixes: Prefixes, line: Line) -> None:
    prefixes.show(line.name, line.text)


def _ready(shown: Board, record: ClusterRecord, *, detach: bool) -> None:
    shown.close()
    render.stdout().print(record.url or "", soft_wrap=True)
    how = f"`pdctl down {record.cluster}` stops it" if detach else "Ctrl-C stops it"
    shown.say(f"{record.cluster} serves {record.plan.model} at {record.url}; {how}")
