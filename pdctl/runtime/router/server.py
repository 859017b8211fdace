"""The router's process: attach, bind, serve until told to stop."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import AsyncIterator
from functools import partial

import aiohttp
import anyio
from aiohttp import web
from anyio.abc import TaskGroup, TaskStatus

from pdctl.engines.channel import PairStates, RouterAssignment, RouterReport
from pdctl.errors import LaunchError
from pdctl.runtime.router.aborts import Aborter
from pdctl.runtime.router.app import Front
from pdctl.runtime.router.calibration import Calibrated
from pdctl.runtime.router.canary import Canary
from pdctl.runtime.router.keeping import Keeping
from pdctl.runtime.router.legs import open_session
from pdctl.runtime.router.link import AgentLink
from pdctl.runtime.router.malformed import MAX_LINE_BYTES, Runner
from pdctl.runtime.router.members import Roster
from pdctl.runtime.router.metrics import Meter
from pdctl.runtime.router.probes import Probes
from pdctl.runtime.router.relay import Relay
from pdctl.runtime.router.ward import Ward

log = logging.getLogger("pdctl.router")

SHUTDOWN_S = 2.0
"""For requests that still run when the router is told to stop."""


class Router:
    """One router, assembled from its assignment; `url` is known once it serves."""

    def __init__(
        self, link: AgentLink, assignment: RouterAssignment, roster: Roster, meter: Meter
    ) -> None:
        self.assignment = assignment
        self.roster = roster
        self.meter = meter
        self.link = link
        self.url = ""
        self.aborter: Aborter | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def connections_in_use(self) -> int:
        """Connections to engines that a leg, an abort or a probe holds now."""
        connector = None if self._session is None else self._session.connector
        return 0 if connector is None else len(connector._acquired)

    async def run(self, *, started: anyio.Event | None = None) -> None:
        """Serves until cancelled.

        Raises:
            LaunchError: the address cannot be bound, or another run's agent answers.
        """
        async with open_session() as session, anyio.create_task_group() as tasks:
            self._session = session
            self.aborter = Aborter(session, tasks)
            relay = Relay(
                self.assignment,
                self.roster,
                session,
                self.aborter,
                self.meter,
                self.link.refresh,
            )
            self.link.on_assignment = partial(self._adopt, relay)
            keeping = Keeping(self.assignment.costs_path, relay.judge)
            await keeping.load()
            canary = Calibrated(
                Canary(relay, self.roster), relay, self.roster, self.link.refresh, keeping.store
            )
            front = Front(
                relay, self.roster, self.meter, self.link.refresh, self.assignment.api_key
            )
            async with self._listening(front, relay):
                self._watch(tasks, session, Ward(self.roster, canary))
                tasks.start_soon(keeping.run)
                if started is not None:
                    started.set()
                await anyio.sleep_forever()

    def _watch(self, tasks: TaskGroup, session: aiohttp.ClientSession, ward: Ward) -> None:
        tasks.start_soon(self.link.run, self.assignment)
        tasks.start_soon(self._announce)
        tasks.start_soon(ward.run)
        tasks.start_soon(Probes(self.roster, session).run)

    def _adopt(self, relay: Relay, assignment: RouterAssignment) -> None:
        """The cluster was changed under the router. Address and API key are read at start."""
        if assignment == self.assignment:
            return
        self.assignment = assignment
        relay.adopt(assignment)
        self.roster.adopt(assignment.plan)
        log.info("adopted paths=%s", ",".join(path.text for path in self.roster.paths))

    async def _announce(self) -> None:
        """Tells the agent every change of a path's state."""
        while True:
            await self.link.tell(
                PairStates(
                    url=self.url,
                    pairs=self.roster.pair_states(),
                    replicas=self.roster.replica_states(),
                )
            )
            await self.roster.changed()

    @contextlib.asynccontextmanager
    async def _listening(self, front: Front, relay: Relay) -> AsyncIterator[None]:
        runner = Runner(
            front.application(),
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            shutdown_timeout=SHUTDOWN_S,
        )
        await runner.setup()
        try:
            host, port = split_bind(self.assignment.plan.router_bind)
            site = web.TCPSite(runner, host, port)
            try:
                await site.start()
            except OSError as error:
                raise LaunchError(f"the router cannot listen on {host}:{port}: {error}") from None
            self.url = _url(host, runner)
            log.info("listening url=%s", self.url)
            yield
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(3 * SHUTDOWN_S):
                await self._end_requests(runner, relay)

    async def _end_requests(self, runner: Runner, relay: Relay) -> None:
        """Accepts no more, gives those that run `SHUTDOWN_S`, then ends them: their clients
        are told, and the engines' legs aborted, while there is still somebody to do it."""
        for site in list(runner.sites):
            await site.stop()
        with anyio.move_on_after(SHUTDOWN_S):
            while self.meter.active:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        relay.stopping.set()
        await runner.cleanup()


def split_bind(bind: str) -> tuple[str, int]:
    """("127.0.0.1", 8000) from "127.0.0.1:8000", ("::1", 8000) from "[::1]:8000"."""
    host, _, port = bind.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _url(host: str, runner: web.AppRunner) -> str:
    port = runner.addresses[0][1]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


async def serve(socket_path: str) -> None:
    """Attaches to the agent and serves until SIGTERM or SIGINT.

    Raises:
        LaunchError: as `Router.run` and `AgentLink.attach`.
    """
    async with anyio.create_task_group() as tasks:
        await tasks.start(_stop_on_signal, tasks.cancel_scope)
        router = Router(*await attached(socket_path))
        await router.run()


async def attached(socket_path: str) -> tuple[AgentLink, RouterAssignment, Roster, Meter]:
    """The link, and what is built from the assignment that it brought."""
    built: list[tuple[Roster, Meter]] = []
    link = AgentLink(
        socket_path,
        on_members=lambda members: built[0][0].update(members),
        report=lambda seq: _report(seq, *built[0]),
    )
    assignment = await link.attach()
    roster = Roster(assignment.plan)
    built.append((roster, Meter(roster)))
    return link, assignment, roster, built[0][1]


def _report(seq: int, roster: Roster, meter: Meter) -> RouterReport:
    return RouterReport(
        seq=seq,
        requests_active=meter.active,
        requests_total=meter.total,
        requests_failed=meter.failures,
        active=roster.active(),
        draining=roster.drained(),
    )


async def _stop_on_signal(
    scope: anyio.CancelScope, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            scope.cancel()
            return
