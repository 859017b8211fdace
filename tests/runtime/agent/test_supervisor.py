from __future__ import annotations

import os
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from pdctl.engines.channel import REPLICA_ENV, RUN_ENV
from pdctl.engines.interface import Command
from pdctl.runtime.agent.lifecycle import SETTLED, Event, Limits, State
from pdctl.runtime.agent.supervisor import Order, Supervised
from pdctl.runtime.machine import process

pytestmark = pytest.mark.anyio

QUICK = Limits(
    ready_s=20.0, reattach_s=20.0, backoff_first_s=0.01, backoff_most_s=0.02, grace_s=5.0
)
SLEEP = ("sleep", "600")


class Watched:
    """One supervised process and the states that it was seen in."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.argv: tuple[str, ...] = SLEEP
        self.states: list[State] = []
        self.one: Supervised = None  # type: ignore[assignment]

    def changed(self) -> None:
        if self.one is not None and self.one.state not in self.states[-1:]:
            self.states.append(self.one.state)

    async def reach(self, *states: State) -> None:
        await self.one.settle(frozenset(states))

    @property
    def pid(self) -> int:
        assert self.one.mark is not None
        return self.one.mark.pid


@asynccontextmanager
async def supervised(folder: Path, limits: Limits = QUICK) -> AsyncIterator[Watched]:
    watched = Watched(uuid.uuid4().hex)

    def order() -> Order:
        env = {RUN_ENV: watched.run, REPLICA_ENV: "p0"}
        command = Command(argv=watched.argv, env=env)
        return Order(command=command, base=dict(os.environ), log=folder / "log", run=watched.run)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            watched.one = Supervised("p0", order, limits, tasks, watched.changed)
            tasks.start_soon(watched.one.run)
            yield watched
            watched.one.post(Event.STOP)
            await watched.reach(*SETTLED)
            assert process.marked(watched.run) == []
            tasks.cancel_scope.cancel()


async def test_start_ready_stop(tmp_path: Path) -> None:
    """stopped → starting → ready → stopping → stopped, and the process is gone."""
    async with supervised(tmp_path) as it:
        it.one.post(Event.START)
        await it.reach(State.STARTING)
        it.one.post(Event.READY, incarnation=1)
        await it.reach(State.READY)
        it.one.post(Event.STOP)
        await it.reach(State.STOPPED)
        assert it.states == [State.STARTING, State.READY, State.STOPPING, State.STOPPED]
        assert (it.one.mark, it.one.restarts, it.one.incarnation) == (None, 0, 1)


async def test_a_killed_process_comes_back_with_another_incarnation(tmp_path: Path) -> None:
    """R61, U35: it is started again, counted, and known as a new one."""
    async with supervised(tmp_path) as it:
        it.one.post(Event.START)
        await it.reach(State.STARTING)
        it.one.post(Event.READY, incarnation=1)
        await it.reach(State.READY)
        first = it.pid
        os.kill(first, signal.SIGKILL)
        await it.reach(State.STARTING)
        assert it.pid != first
        assert (it.one.incarnation, it.one.restarts) == (2, 1)
        assert it.one.cause == "it was ended by SIGKILL"
        it.one.post(Event.READY, incarnation=1)
        await anyio.wait_all_tasks_blocked()
        assert it.one.state is State.STARTING
        it.one.post(Event.READY, incarnation=2)
        await it.reach(State.READY)
        assert it.one.cause is None


async def test_a_process_that_keeps_exiting_fails(tmp_path: Path) -> None:
    """A crash loop ends in `failed`, with the last exit as its cause; a restart clears it."""
    async with supervised(tmp_path) as it:
        it.argv = ("sh", "-c", "exit 3")
        it.one.post(Event.START)
        await it.reach(State.FAILED)
        assert it.one.incarnation == QUICK.crashes
        assert it.one.cause == "it exited with status 3"
        it.argv = SLEEP
        it.one.post(Event.RESTART)
        await it.reach(State.STARTING)
        assert process.is_alive(it.one.mark)  # type: ignore[arg-type]


async def test_a_program_that_does_not_exist_fails_by_name(tmp_path: Path) -> None:
    """What can't be executed counts as an exit, and its cause names the program."""
    async with supervised(tmp_path) as it:
        it.argv = ("/no/such/python", "-m", "engine")
        it.one.post(Event.START)
        await it.reach(State.FAILED)
        assert it.one.cause == "/no/such/python can't be run: No such file or directory"


async def test_a_process_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    """R6: past the ready deadline it is killed, and tried again until the budget is spent."""
    limits = msgspec.structs.replace(QUICK, ready_s=0.05)
    async with supervised(tmp_path, limits) as it:
        it.one.post(Event.START)
        await it.reach(State.FAILED)
        assert it.one.cause == "it was not ready within 0.05 s"
        assert it.one.incarnation == limits.crashes


async def test_a_disagreement_fails_at_once(tmp_path: Path) -> None:
    """R54: what loaded something else is ended and not tried again."""
    async with supervised(tmp_path) as it:
        it.one.post(Event.START)
        await it.reach(State.STARTING)
        it.one.post(Event.DIFFERS, "positions.rope_theta should be 1", incarnation=1)
        await it.reach(State.FAILED)
        assert (it.one.mark, it.one.incarnation) == (None, 1)
        assert it.one.cause == "positions.rope_theta should be 1"


async def test_a_lost_connection_has_time_to_come_back(tmp_path: Path) -> None:
    """Detached, it keeps its process; Ready again makes it ready, silence ends it."""
    async with supervised(tmp_path) as it:
        it.one.post(Event.START)
        await it.reach(State.STARTING)
        it.one.post(Event.READY, incarnation=1)
        await it.reach(State.READY)
        pid = it.pid
        it.one.post(Event.LOST, incarnation=1)
        await it.reach(State.DETACHED)
        it.one.post(Event.READY, incarnation=1)
        await it.reach(State.READY)
        assert it.pid == pid
        it.one.limits = msgspec.structs.replace(QUICK, reattach_s=0.05)
        it.one.post(Event.LOST, incarnation=1)
        await it.reach(State.DETACHED)
        await it.reach(State.STARTING)
        assert it.one.incarnation == 2


async def test_an_engine_ends_with_the_process_that_owns_its_memory(tmp_path: Path) -> None:
    """R61: its server would live on for a while, and answer nobody."""
    async with supervised(tmp_path) as it, await anyio.open_process(SLEEP) as owner:
        it.one.post(Event.START)
        await it.reach(State.STARTING)
        it.one.owned_by(owner.pid)
        it.one.post(Event.READY, incarnation=1)
        await it.reach(State.READY)
        server = it.one.mark
        assert server is not None
        owner.kill()
        await it.reach(State.STARTING)
        assert it.one.incarnation == 2
        assert it.one.cause == "the process that owns its memory ended"
        assert not process.is_alive(server)


async def test_a_restart_waits_for_the_old_process_to_go(tmp_path: Path) -> None:
    """The new one starts only when nothing of the old one is left: ports are free."""
    async with supervised(tmp_path) as it:
        it.one.post(Event.START)
        await it.reach(State.STARTING)
        old = it.one.mark
        assert old is not None
        it.one.post(Event.RESTART)
        await it.reach(State.STARTING)
        assert not process.is_alive(old)
        assert it.states == [State.STARTING, State.RESTARTING, State.STARTING]


async def test_a_living_process_is_adopted(tmp_path: Path) -> None:
    """A new agent takes over by pid and birth, keeps the incarnation, and hears the exit."""
    async with supervised(tmp_path) as first:
        first.one.post(Event.START)
        await first.reach(State.STARTING)
        first.one.post(Event.READY, incarnation=1)
        await first.reach(State.READY)
        entry = first.one.entry()
        assert (entry.wanted, entry.attached) == (True, True)
        async with supervised(tmp_path) as second:
            second.one.adopt(entry)
            await second.reach(State.DETACHED)
            assert (second.pid, second.one.incarnation) == (first.pid, 1)
            os.kill(first.pid, signal.SIGKILL)
            await second.reach(State.STARTING)
            assert second.one.incarnation == 2


async def test_a_dead_process_is_adopted_as_an_exit(tmp_path: Path) -> None:
    """What died while no agent watched is started again."""
    async with supervised(tmp_path) as first:
        first.one.post(Event.START)
        await first.reach(State.STARTING)
        entry = first.one.entry()
    async with supervised(tmp_path) as second:
        second.one.adopt(entry)
        await second.reach(State.BACKOFF)
        await second.reach(State.STARTING)
        assert second.one.incarnation == 2
