"""`pdctl restart`: one replica, or the router, anew."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import anyio
import typer

from pdctl.cli import render
from pdctl.cli.arguments import Cluster, ReplicaOrRouter
from pdctl.cli.launch_view import Board, board
from pdctl.errors import ClusterError, InterruptedLaunch
from pdctl.runtime.agent.journal import ROUTER
from pdctl.runtime.change.draining import StillActive, refuse_unknown
from pdctl.runtime.change.rolling import rolling
from pdctl.runtime.cluster import lock
from pdctl.runtime.cluster.state import ClusterRecord, StateDir, running
from pdctl.runtime.launch.interruption import interruptible


def restart(
    topology: Cluster,
    replica: ReplicaOrRouter,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Seconds to wait for its running requests; the topology's handoff.timeout_s "
            "by default.",
            show_default=False,
        ),
    ] = None,
    wait_timeout: Annotated[
        float, typer.Option(help="Seconds until it must be back.", min=0.001)
    ] = 1800.0,
    now: Annotated[bool, typer.Option("--now", help="Cut its running requests.")] = False,
) -> None:
    """Drain, stop and start one replica, and wait until every path of it answers again.

    Its running requests are answered first; new ones go elsewhere, or get 503 where there is no
    other path. It has come back when a real generation has gone through each of its paths, and
    then takes requests, drained before or not. The router is drained and restarted likewise,
    under the name "router"."""
    state, record = running(topology)
    refuse_unknown(record, replica, also=(ROUTER,))
    limit_s = record.topology.handoff.timeout_s if timeout is None else timeout
    drain_s = None if now else limit_s
    with lock.held(state.lock, record.cluster), board() as shown:
        work = partial(_restart, state, record, replica, shown, drain_s, wait_timeout)
        try:
            anyio.run(partial(interruptible, work))
        except StillActive as error:
            raise ClusterError(
                f"{error.message}; it was not restarted",
                hint="a longer --timeout waits longer, and --now cuts them",
            ) from error
        except InterruptedLaunch as error:
            raise InterruptedLaunch(
                error.message, hint=f"`pdctl ps {record.cluster}` shows how {replica} is"
            ) from None
    render.stdout().print(f"{replica} is back")


async def _restart(
    state: StateDir,
    record: ClusterRecord,
    replica: str,
    shown: Board,
    drain_s: float | None,
    wait_s: float,
) -> None:
    def told(count: int) -> None:
        shown.say(f"waiting for {render.counted(count, 'request')} on {replica} …")

    async with rolling(state, record, shown.show, told=told) as work:
        await work.restart(replica, drain_s=drain_s, wait_s=wait_s)
