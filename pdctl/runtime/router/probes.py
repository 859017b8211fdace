"""Active health checks. They close a replica that does not answer, and clear passive marks.

An answer of any kind is health: only a connection that fails, or silence, is not.
"""

from __future__ import annotations

import logging

import aiohttp
import anyio

from pdctl.runtime.router.endpoints import HEALTH
from pdctl.runtime.router.members import Roster, Seat

log = logging.getLogger("pdctl.router")

PROBE_EVERY_S = 5.0
PROBE_SUSPECT_EVERY_S = 0.5
PROBE_TIMEOUT_S = 5.0
SILENT_LIMIT = 3
"""Probes without an answer before a replica that nothing else accuses is closed."""


class Probes:
    """Asks each ready replica's `/health`; a suspect's at once, and then more often, so that
    one request's broken connection closes a live replica for a moment only."""

    def __init__(self, roster: Roster, session: aiohttp.ClientSession) -> None:
        self._roster = roster
        self._session = session
        self._silent: dict[str, int] = {}

    async def run(self) -> None:
        """Watches every replica of the plan, now and later; ends by cancellation."""
        watched: set[str] = set()
        async with anyio.create_task_group() as tasks:
            while True:
                for name in self._names() - watched:
                    watched.add(name)
                    tasks.start_soon(self._watch, name, watched)
                await self._roster.changed()

    def _names(self) -> set[str]:
        return {replica.name for replica in self._roster.plan.replicas}

    async def _watch(self, name: str, watched: set[str]) -> None:
        """Until the plan has the replica no more."""
        while name in self._names():
            seat = self._roster.seat(name)
            suspected = seat is not None and seat.suspect is not None
            with anyio.move_on_after(PROBE_SUSPECT_EVERY_S if suspected else PROBE_EVERY_S):
                await self._accused(name, suspected)
            seat = self._roster.seat(name)
            if seat is not None and seat.state.state in ("ready", "draining"):
                await self._probe(seat)
        watched.discard(name)

    async def _accused(self, name: str, already: bool) -> None:
        """Until the replica is first suspected; for good where it is already."""
        while True:
            await self._roster.changed()
            seat = self._roster.seat(name)
            if not already and seat is not None and seat.suspect is not None:
                return

    async def _probe(self, seat: Seat) -> None:
        cause = await self._asked(seat.base_url)
        if cause is None:
            self._silent[seat.name] = 0
            self._roster.trust(seat)
            return
        self._silent[seat.name] = self._silent.get(seat.name, 0) + 1
        if self._silent[seat.name] >= SILENT_LIMIT:
            self._roster.suspect(seat, f"{seat.name} does not answer: {cause}")

    async def _asked(self, base_url: str) -> str | None:
        with anyio.move_on_after(PROBE_TIMEOUT_S):
            try:
                async with self._session.get(base_url + HEALTH):
                    return None
            except (aiohttp.ClientError, OSError) as error:
                return str(error) or type(error).__name__
        return f"no answer to {HEALTH} within {PROBE_TIMEOUT_S:g} s"
