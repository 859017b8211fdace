"""Ends what engines still run for requests that are over.

A relay hands a leg over without waiting, so that no cancellation can come between; the
router owns the task group, and every abort has a deadline of its own.
"""

from __future__ import annotations

import logging
from typing import Any

import aiohttp
import anyio
from anyio.abc import TaskGroup

from pdctl.engines.interface import EngineSpec
from pdctl.runtime.router.members import Seat

log = logging.getLogger("pdctl.router")

ABORT_TIMEOUT_S = 2.0
TRIES = 2


class Aborter:
    """Posts aborts, each bounded and tried twice (R14)."""

    def __init__(self, session: aiohttp.ClientSession, tasks: TaskGroup) -> None:
        self._session = session
        self._tasks = tasks
        self.running = 0

    def abort(self, seat: Seat, spec: EngineSpec, room: int) -> None:
        """Ends the room's leg on that replica. Returns at once; does nothing where closing
        the connection was enough or the replica is gone."""
        self._order(seat, spec.abort(room), room)

    def release(self, seat: Seat, spec: EngineSpec, room: int) -> None:
        """Ends what a prefill leg that was answered still holds for the room; as `abort`."""
        self._order(seat, spec.release(room), room)

    def _order(self, seat: Seat, order: tuple[str, dict[str, Any]] | None, room: int) -> None:
        if order is None or seat.lost.is_set():
            return
        path, body = order
        self.running += 1
        self._tasks.start_soon(self._end, seat, path, body, room)

    async def _end(self, seat: Seat, path: str, body: dict[str, Any], room: int) -> None:
        try:
            for _ in range(TRIES):
                if seat.lost.is_set() or await self._post(seat.base_url + path, body):
                    return
            log.warning("abort not taken replica=%s room=%d", seat.name, room)
        finally:
            self.running -= 1

    async def _post(self, url: str, body: dict[str, Any]) -> bool:
        with anyio.move_on_after(ABORT_TIMEOUT_S, shield=True):
            try:
                async with self._session.post(url, json=body) as response:
                    return response.status < 500
            except (aiohttp.ClientError, OSError):
                return False
        return False
