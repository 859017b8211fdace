"""Drives one process through `lifecycle.TABLE`: its events in order, one action at a time."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.abc

from pdctl.engines.channel import Ready
from pdctl.engines.interface import Command
from pdctl.runtime.agent.journal import Entry
from pdctl.runtime.agent.lifecycle import (
    TABLE,
    Action,
    CrashBudget,
    Event,
    Limits,
    State,
    state_limit_s,
)
from pdctl.runtime.hosts.interface import Mark
from pdctl.runtime.machine import process
from pdctl.trace import monotonic_s

log = logging.getLogger("pdctl.agent")


class Order(NamedTuple):
    """How to start one process, whole."""

    command: Command
    base: dict[str, str]
    """The environment that the command's is added to."""
    log: Path
    run: str


class Supervised:
    """One process, through all its incarnations. Everything here belongs to the event loop.

    `run` is its one driver, in the agent's task group; `post` gives it an event and never
    waits. `changed` is called, synchronously, whenever something that others see has changed.
    """

    def __init__(
        self,
        name: str,
        order: Callable[[], Order],
        limits: Limits,
        tasks: anyio.abc.TaskGroup,
        changed: Callable[[], None],
    ) -> None:
        self.name = name
        self.limits = limits
        self.state = State.STOPPED
        self.cause: str | None = None
        self.mark: Mark | None = None
        self.started_at: float | None = None
        self.incarnation = 0
        self.restarts = 0
        self.ready: Ready | None = None
        self.drained = False
        """It is to get no new request, through all restarts, until that is undone."""
        self._order = order
        self._tasks = tasks
        self._changed = changed
        self._budget = CrashBudget()
        self._since_s = monotonic_s()
        self._ready_since_s: float | None = None
        self._pending: dict[tuple[Event, int], str | None] = {}
        self._arrived = anyio.Event()
        self._idle = anyio.Event()
        self._life = anyio.CancelScope()
        self._busy = False

    # -- what others say

    def post(self, event: Event, cause: str | None = None, *, incarnation: int = 0) -> None:
        """Queues an event; one that waits already is not queued twice.

        Args:
            incarnation: of the process that it is about; dropped when that one has gone.
                0: of whichever there is.
        """
        self._pending[(event, incarnation)] = cause
        self._arrived.set()

    def adopt(self, entry: Entry) -> None:
        """Takes over what an earlier agent started, alive or not. Before `run`."""
        if entry.mark is None:
            return
        self.mark, self.started_at = entry.mark, entry.started_at
        self.incarnation, self.restarts = entry.incarnation, entry.restarts
        self.ready = entry.ready
        if process.is_alive(entry.mark):
            self._enter(State.DETACHED if entry.attached else State.STARTING)
        else:
            self._enter(State.STARTING)
        self._tasks.start_soon(self._watch, entry.mark, None, entry.incarnation)

    def owned_by(self, pid: int | None) -> None:
        """The process that has attached owns the engine's memory: where that ends the engine has
        ended, however long its server takes to notice (SGLang's: 6 s)."""
        owner = None if pid is None else process.mark_of(pid)
        if owner is not None and owner != self.mark:
            self._tasks.start_soon(self._watch_owner, owner, self.incarnation)

    def drain(self, *, undo: bool) -> bool:
        """Returns whether it was drained before."""
        before, self.drained = self.drained, not undo
        self._changed()
        return before

    async def settle(self, states: frozenset[State]) -> None:
        """Waits until it is in one of these states. Unbounded: put a deadline around it."""
        while self._busy or self._pending or self.state not in states:
            await self._idle.wait()

    def entry(self) -> Entry:
        stopped = self.state in (State.STOPPED, State.STOPPING)
        return Entry(
            name=self.name,
            mark=self.mark,
            started_at=self.started_at,
            incarnation=self.incarnation,
            restarts=self.restarts,
            wanted=not stopped and self.state is not State.FAILED,
            ready=self.ready,
            attached=self.state in (State.READY, State.DETACHED),
            drained=self.drained,
        )

    # -- the driver

    async def run(self) -> None:
        """Ends by cancellation, or by `retire`; leaves its process as it is."""
        with self._life:
            while True:
                event, cause = await self._next()
                self._busy = True
                await self._handle(event, cause)
                self._busy = False

    def retire(self) -> None:
        """It is wanted no more; call it once it is settled."""
        self._life.cancel()

    async def _next(self) -> tuple[Event, str | None]:
        while True:
            while self._pending:
                event, incarnation = next(iter(self._pending))
                cause = self._pending.pop((event, incarnation))
                if incarnation in (0, self.incarnation):
                    return event, cause
            self._arrived = anyio.Event()
            self._idle.set()
            self._idle = anyio.Event()
            limit_s = state_limit_s(self.state, self._budget, self.limits)
            left_s = float("inf") if limit_s is None else self._since_s + limit_s - monotonic_s()
            with anyio.move_on_after(left_s):
                await self._arrived.wait()
                continue
            if self.state is State.BACKOFF:
                return Event.RETRY, None
            what = "did not attach again" if self.state is State.DETACHED else "was not ready"
            return Event.LATE, f"it {what} within {limit_s:g} s"

    async def _handle(self, event: Event, cause: str | None) -> None:
        if event in (Event.EXIT, Event.LATE) and (self.state, event) in TABLE:
            event = self._judged(event)
        step = TABLE.get((self.state, event))
        if step is None:
            return
        if step.state is not self.state:
            why = f" ({cause})" if cause else ""
            log.info("replica=%s %s: %s → %s%s", self.name, event, self.state, step.state, why)
        if event in (Event.START, Event.RESTART):
            self._budget = CrashBudget()
        if event is Event.READY:
            self._ready_since_s = self._ready_since_s or monotonic_s()
            self.cause = None
        elif cause is not None:
            self.cause = cause
        self._enter(step.state)
        if step.action is Action.SPAWN:
            self._spawn()
        elif step.action is Action.KILL:
            await self._kill()

    def _judged(self, event: Event) -> Event:
        since = self._ready_since_s
        ready_for_s = 0.0 if since is None else monotonic_s() - since
        self._budget = self._budget.after_end(ready_for_s, self.limits)
        return Event.CRASH_LOOP if self._budget.spent(self.limits) else event

    def _enter(self, state: State) -> None:
        if state is not self.state:
            self._since_s = monotonic_s()
        self.state = state
        self._changed()

    def _spawn(self) -> None:
        again = self.incarnation > 0
        self.incarnation += 1
        self.restarts += again
        self.ready = self._ready_since_s = None
        self._since_s = monotonic_s()
        order = self._order()
        try:
            child = process.start(order.command, log=order.log, base=order.base)
        except OSError as error:
            self.mark = self.started_at = None
            cause = f"{order.command.argv[0]} can't be run: {error.strerror}"
            self.post(Event.EXIT, cause, incarnation=self.incarnation)
            self._changed()
            return
        self.mark = process.mark_of(child.pid) or Mark(pid=child.pid, birth="gone")
        self.started_at = time.time()
        self._tasks.start_soon(self._watch, self.mark, child, self.incarnation)
        self._changed()

    async def _kill(self) -> None:
        mark, self.ready = self.mark, None
        left: list[Mark] = []
        if mark is not None:
            left = await process.stop(
                mark, grace_s=self.limits.grace_s, run=self._order().run, replica=self.name
            )
        for event in (Event.EXIT, Event.LOST, Event.READY, Event.DIFFERS):
            self._pending.pop((event, self.incarnation), None)
        if left:
            self.post(Event.STUCK, f"process {left[0].pid} does not end, not even by SIGKILL")
        else:
            self.mark = self.started_at = self._ready_since_s = None
            self.post(Event.GONE)
        self._changed()

    async def _watch(
        self, mark: Mark, child: subprocess.Popen[bytes] | None, incarnation: int
    ) -> None:
        await process.wait_exit(mark)
        status = None if child is None else await anyio.to_thread.run_sync(child.wait)
        self.post(Event.EXIT, _ending(status), incarnation=incarnation)

    async def _watch_owner(self, owner: Mark, incarnation: int) -> None:
        await process.wait_exit(owner)
        self.post(Event.EXIT, "the process that owns its memory ended", incarnation=incarnation)


def _ending(status: int | None) -> str:
    if status is None:
        return "it ended"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"it was ended by {signal.Signals(-status).name}"
        return f"it was ended by signal {-status}"
    return f"it exited with status {status}"
