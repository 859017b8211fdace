"""`pdctl drain`: no new requests for one replica."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import anyio
import typer

from pdctl.cli import render
from pdctl.cli.arguments import Cluster, Replica
from pdctl.errors import ClusterError, InterruptedLaunch
from pdctl.runtime.change.draining import StillActive, closing, refuse_unknown, wait_idle
from pdctl.runtime.cluster.keeper import keeper_of
from pdctl.runtime.cluster.state import ClusterRecord, StateDir, running
from pdctl.runtime.launch.interruption import interruptible


def drain(
    topology: Cluster,
    replica: Replica,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take requests again.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Seconds to wait for its running requests; the topology's handoff.timeout_s "
            "by default.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Send no new requests to one replica, and wait until its running ones are done.

    It keeps running, and stays closed through crashes of its own or of its agent, until `--undo`
    or `pdctl restart` opens it. Draining a prefill replica closes its pairs; which paths stay is
    said first, and requests get 503 where none does."""
    state, record = running(topology)
    refuse_unknown(record, replica)
    if undo:
        anyio.run(partial(_open, state, record, replica))
        return
    limit_s = record.topology.handoff.timeout_s if timeout is None else timeout
    try:
        work = partial(_drain, state, record, replica, limit_s)
        anyio.run(partial(interruptible, work))
    except InterruptedLaunch as error:
        raise InterruptedLaunch(
            f"{error.message}; {replica} stays draining", hint=_how(record, replica)
        ) from None
    except StillActive as error:
        raise ClusterError(
            f"{error.message}; {replica} stays draining", hint=_how(record, replica)
        ) from error


async def _drain(state: StateDir, record: ClusterRecord, replica: str, timeout_s: float) -> None:
    say = render.stderr().print
    async with keeper_of(state, record) as keeper:
        closes, stay = closing(await keeper.snapshot(), replica)
        if closes:
            say(f"this closes {', '.join(closes)}; {_staying(stay)}", soft_wrap=True)
        before = await keeper.drain(replica)
        await wait_idle(
            keeper,
            replica,
            timeout_s=timeout_s,
            told=lambda count: say(
                f"waiting for {render.counted(count, 'request')} on {replica} …"
            ),
        )
    word = "is drained already" if before else "is drained"
    render.stdout().print(f"{replica} {word}: nothing runs on it", soft_wrap=True)
    say(_how(record, replica), soft_wrap=True)


def _waiting(replica: str, count: int) -> None:
    text = f"waiting for {render.counted(count, 'request')} on {replica} …"
    render.stderr().print(text, soft_wrap=True)


async def _open(state: StateDir, record: ClusterRecord, replica: str) -> None:
    async with keeper_of(state, record) as keeper:
        before = await keeper.drain(replica, undo=True)
    word = "takes requests again" if before else "was not draining"
    render.stdout().print(f"{replica} {word}", soft_wrap=True)


def _staying(paths: tuple[str, ...]) -> str:
    if not paths:
        return "no path stays, and requests are answered with 503"
    return f"{', '.join(paths)} stay{'s' if len(paths) == 1 else ''}"


def _how(record: ClusterRecord, replica: str) -> str:
    return f"`pdctl drain {record.cluster} {replica} --undo` opens it again"
