"""Whether a request moves on while no leg says anything: the engines' own account (R5)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pdctl.handoff.counters import Counters
from pdctl.runtime.router.members import Roster
from pdctl.runtime.router.policy import Path


class HandoffProgress:
    """One room of one try.

    Args:
        refresh: brings fresh counters into the roster, bounded.
    """

    def __init__(
        self, roster: Roster, path: Path, room: int, refresh: Callable[[], Awaitable[bool]]
    ) -> None:
        self._roster = roster
        self._path = path
        self._room = room
        self._refresh = refresh
        self._told: dict[str, float] = {}

    async def idle_s(self) -> float | None:
        """Seconds since its last progress, by the end that moved last: of the handoff, or a token
        that decode computed of an answer that is not streamed. None where neither end has it, or
        neither answers. A replica that does not answer keeps the counters that it had: the very
        same number again is none."""
        await self._refresh()
        fresh = []
        for name in self._path.replicas:
            seat = self._roster.seat(name)
            told = None if seat is None else self._told_by(seat.state.counters)
            if told is not None and told != self._told.get(name):
                self._told[name] = told
                fresh.append(told)
        return min(fresh, default=None)

    def _told_by(self, counters: Counters) -> float | None:
        return counters.rooms.get(self._room, counters.decoding.get(self._room))
