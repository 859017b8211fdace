"""`pdctl up` on a cluster that runs: the difference is shown, and applied alone."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import anyio
import typer

from pdctl.cli import render
from pdctl.cli.launch_view import Board, board
from pdctl.errors import AgentLost, InterruptedLaunch
from pdctl.runtime.change.changing import Changing, changed_record, difference, refuse
from pdctl.runtime.change.rolling import rolling
from pdctl.runtime.checks.validation import Validation, validate
from pdctl.runtime.cluster.keeper import agent_of, hosts_of, in_thread
from pdctl.runtime.cluster.state import ClusterRecord, StateDir
from pdctl.runtime.launch.interruption import interruptible
from pdctl.topology.changes import Changes
from pdctl.topology.model import Topology


async def stands(state: StateDir, record: ClusterRecord) -> bool:
    """Whether the keeper answers; False where nothing of the cluster runs any more, anywhere.

    Raises:
        AgentLost: it does not answer, and something runs.
    """
    with hosts_of(record) as hosts:
        keeper = await agent_of(record.plan.router_host, state, record, hosts)
        try:
            await keeper.check()
        except AgentLost as error:
            for host in hosts.values():
                if await in_thread(host.marked, record.run):
                    hint = f"`pdctl ps {record.cluster}` shows what runs, `pdctl down` stops it"
                    raise AgentLost(error.message, hint=hint) from error
            return False
    return True


def change(state: StateDir, record: ClusterRecord, path: Path, *, wait_s: float) -> None:
    """Brings a running cluster to what its file says now. The caller holds the lock."""
    with render.steps() as watcher:
        checked = validate(path, watcher=watcher, kept=record.plan)
    render.show_diagnostics(checked.report)
    if not checked.report.valid or checked.topology is None:
        raise typer.Exit(checked.report.exit_code)
    api_key = _api_key(checked.topology)
    with board() as shown:
        work = partial(_apply, state, record, shown, wait_s=wait_s)
        try:
            done = anyio.run(partial(interruptible, partial(work, path, checked, api_key)))
        except InterruptedLaunch as error:
            raise InterruptedLaunch(f"{error.message}; the cluster is as it was") from None
    render.stdout().print(done.url or "", soft_wrap=True)


def _api_key(topology: Topology) -> str | None:
    name = topology.router.api_key_env
    return None if name is None else os.environ[name]


async def _apply(
    state: StateDir,
    record: ClusterRecord,
    shown: Board,
    path: Path,
    checked: Validation,
    api_key: str | None,
    *,
    wait_s: float,
) -> ClusterRecord:
    def told(count: int) -> None:
        shown.say(f"waiting for {render.counted(count, 'request')} to end …")

    async with rolling(state, record, shown.show, told=told, patient=False) as work:
        snapshot = await work.keeper.snapshot()
        other_key = api_key != state.read_api_key()
        found = difference(record, checked, snapshot, other_key=other_key)
        refuse(record, found)
        draining = [m.name for m in snapshot.members if m.state == "draining"]
        _tell(record, found, draining, shown)
        if found.nothing:
            return record
        changing = Changing(
            state,
            work,
            found,
            changed_record(record, path, checked, found),
            api_key=api_key,
            drain_s=record.topology.handoff.timeout_s,
            wait_s=wait_s,
        )
        done = await changing.run()
        shown.say(f"{record.cluster} runs as {path} says")
        return done


def _tell(record: ClusterRecord, found: Changes, draining: list[str], shown: Board) -> None:
    if found.nothing:
        shown.say(f"{record.cluster} runs as its file says: nothing to change")
    for line in found.lines():
        shown.say(line)
    for name in draining:
        if name not in (*found.removed, *found.restarted):
            shown.say(f"{name} is draining; `pdctl drain {record.cluster} {name} --undo` opens it")
