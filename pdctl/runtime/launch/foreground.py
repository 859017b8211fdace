"""`pdctl up` from its first process to its end: launch, attend, take down."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial

import anyio

from pdctl.errors import ClusterError, HostError
from pdctl.runtime.cluster import lock
from pdctl.runtime.cluster.keeper import hosts_of, in_thread
from pdctl.runtime.cluster.log_places import cluster_logs
from pdctl.runtime.cluster.logs import Line, Log, follow, sizes
from pdctl.runtime.cluster.state import ClusterRecord, StateDir
from pdctl.runtime.hosts.interface import RuntimeHost
from pdctl.runtime.launch.events import Emit
from pdctl.runtime.launch.interruption import Interruption
from pdctl.runtime.launch.launching import launch
from pdctl.runtime.launch.teardown import take_down
from pdctl.runtime.machine import process
from pdctl.trace import monotonic_s

ELSEWHERE_S = 120.0
"""For another command to finish what it does to this cluster."""
LOOK_EVERY_S = 0.2
FAR_LOOK_EVERY_S = 2.0
"""Between two looks at a keeper behind SSH."""
GONE = frozenset({errno.EPIPE, errno.EIO})
"""What writing to a closed pipe, and to a closed terminal, comes to."""

Show = Callable[[Line], None]


class Session:
    """One `pdctl up`.

    Args:
        locked: the held lock's stack; closed as soon as the cluster runs.
        show: gets the logs' lines, with the cluster in the foreground.
        ready: told once, when every path has passed its canary.
        again: told of every signal after the first.
    """

    def __init__(
        self,
        state: StateDir,
        locked: contextlib.ExitStack,
        emit: Emit,
        *,
        show: Show,
        ready: Callable[[ClusterRecord], None],
        again: Callable[[], None],
    ) -> None:
        self.state = state
        self.locked = locked
        self.emit = emit
        self.show = show
        self.ready = ready
        self.interruption = Interruption(again)
        self.unread = False
        """Whether what is shown has lost its reader."""

    async def run(
        self, prepare: Callable[[], ClusterRecord], *, wait_timeout_s: float, detach: bool
    ) -> tuple[str, ...]:
        """Launches; in the foreground, stays until a signal and takes everything down.

        Returns:
            What is left after a taking down.

        Raises:
            LaunchError, InterruptedLaunch: as `launch`.
            ClusterError: the agent ended by itself, or nobody reads the logs any more;
                everything was stopped.
        """
        with self.interruption.watching():
            record = prepare()
            with hosts_of(record) as hosts:
                with anyio.CancelScope() as scope:
                    self.interruption.cancels(scope.cancel)
                    record = await launch(
                        self.state,
                        record,
                        self.emit,
                        wait_timeout_s=wait_timeout_s,
                        interrupted=lambda: self.interruption.name,
                        hosts=hosts,
                    )
                    self.locked.close()
                    skipped = partial(self._unseen, record.cluster)
                    logs = cluster_logs(self.state, record, hosts, missing=skipped)
                    ends = sizes(logs)
                    with self._shown():
                        self.ready(record)
                    if detach:
                        return ()
                    if not self.unread:
                        await self._attend(_keeper_gone(record, hosts), logs, ends)
                return await self._end(record, hosts)

    async def _attend(
        self, gone: Awaitable[None], logs: Mapping[str, Log], ends: Mapping[str, int]
    ) -> None:
        """Shows what the logs grow by beyond `ends`, until the keeper has `gone`, or for ever."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow, logs, ends, tasks.cancel_scope)
            await gone
            tasks.cancel_scope.cancel()

    async def _follow(
        self, logs: Mapping[str, Log], ends: Mapping[str, int], attending: anyio.CancelScope
    ) -> None:
        with self._shown():
            async for line in follow(logs, starts=ends, missing=self._unseen):
                self.show(line)
        attending.cancel()

    def _unseen(self, name: str, why: str) -> None:
        self.show(Line(name=name, text=f"(not shown for now: {why})"))

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in GONE:
                raise
            self.unread = True

    async def _end(
        self, record: ClusterRecord, hosts: Mapping[str, RuntimeHost]
    ) -> tuple[str, ...]:
        with anyio.CancelScope(shield=True):
            async with _locked(self.state, record.cluster):
                present = self.state.read()
                if present is None or present.run != record.run:
                    return ()
                left = await take_down(self.state, present, self.emit, hosts=hosts)
        if not left and self.unread:
            raise ClusterError(
                "nobody reads the logs any more; everything was stopped",
                hint="`pdctl up --detach` runs without a terminal",
            )
        if not left and self.interruption.name is None:
            raise ClusterError(
                "the agent ended by itself; everything was stopped",
                hint=f"its log is {self.state.log(f'agent-{record.plan.router_host}')}",
            )
        return left


async def _keeper_gone(record: ClusterRecord, hosts: Mapping[str, RuntimeHost]) -> None:
    """Until the keeper and its watchdog have ended. A host that can't be reached for now says
    nothing of that."""
    name = record.plan.router_host
    mark = record.agents[name].mark
    if record.topology.hosts[name].ssh is None:
        return await process.wait_exit(mark)
    while True:
        with contextlib.suppress(HostError):
            if not await in_thread(hosts[name].alive, mark):
                return
        await anyio.sleep(FAR_LOOK_EVERY_S)


@contextlib.asynccontextmanager
async def _locked(state: StateDir, cluster: str) -> AsyncIterator[None]:
    """The lock, once another command has let go of it."""
    until_s = monotonic_s() + ELSEWHERE_S
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock.held(state.lock, cluster))
                break
            except ClusterError:
                if monotonic_s() >= until_s:
                    raise
                await anyio.sleep(LOOK_EVERY_S)
        yield
