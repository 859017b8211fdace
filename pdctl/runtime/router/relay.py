"""One request from its checked body to its last byte: path, tries, what is counted.

1. candidates: the pinned path, or the ready ones whose engines honour the body
2. policy picks one; a room and a ticket are minted for it
3. both legs start (attempt.py); the answer goes to the delivery
4. a replica that died before the first byte: one more try on another pair, new room
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Protocol

import aiohttp
import anyio

from pdctl.engines.channel import RouterAssignment
from pdctl.engines.interface import EngineSpec, Leg
from pdctl.engines.registry import spec_for
from pdctl.handoff.ticket import mint
from pdctl.runtime.router.aborts import Aborter
from pdctl.runtime.router.attempt import Attempt, Delivery
from pdctl.runtime.router.blame import explained, is_unexplained
from pdctl.runtime.router.failure import RequestFailed
from pdctl.runtime.router.legs import EngineCall
from pdctl.runtime.router.members import Roster, Seat
from pdctl.runtime.router.policy import (
    Path,
    choose,
    nothing_ready,
    pinned,
    preferred,
    unready,
)
from pdctl.runtime.router.progress import HandoffProgress
from pdctl.runtime.router.recent import Flights
from pdctl.runtime.router.request import Ask, objections
from pdctl.topology.model import OnFailure, Policy, Role

log = logging.getLogger("pdctl.router")

ROOM_BITS = 62


class Tally(Protocol):
    """Where failures are counted."""

    def failed(self, failure: RequestFailed) -> None: ...


class Relay:
    """Serves requests over one roster; the canary goes through `attempt` too (R68)."""

    def __init__(
        self,
        assignment: RouterAssignment,
        roster: Roster,
        session: aiohttp.ClientSession,
        aborter: Aborter,
        tally: Tally,
        refresh: Callable[[], Awaitable[bool]],
    ) -> None:
        self._roster = roster
        self._session = session
        self._aborter = aborter
        self._tally = tally
        self._refresh = refresh
        self.stopping = anyio.Event()
        """Set, it ends every request with an error that says so."""
        self.flights = Flights()
        self._turns = itertools.count()
        self.adopt(assignment)

    def adopt(self, assignment: RouterAssignment) -> None:
        """What holds for every request from now on."""
        self._assignment = assignment
        self._policy = Policy(assignment.policy)
        self._digest = assignment.contract.digest
        self._recomputes = assignment.on_failure is OnFailure.RECOMPUTE

    async def serve(self, ask: Ask, pin: str | None, delivery: Delivery) -> None:
        """Answers one request.

        Raises:
            RequestFailed: what the client should be told.
            ClientGone: the client closed its connection.
        """
        try:
            path = self._pick(ask, pin)
        except RequestFailed as failure:
            self._note(failure)
            raise
        timeout_s = self._assignment.plan.timeout_s
        try:
            await self.attempt(
                path, ask, delivery, timeout_s=timeout_s, recomputes=self._recomputes
            )
            return
        except RequestFailed as failure:
            self._note(failure)
            second = None if delivery.begun else self._second(failure, ask, pin, path)
            if second is None:
                raise
            log.info("second try path=%s after=%s", second.text, failure.message)
        try:
            await self.attempt(
                second,
                ask,
                delivery,
                timeout_s=timeout_s,
                retried=path,
                recomputes=self._recomputes,
            )
        except RequestFailed as failure:
            self._note(failure)
            raise

    async def attempt(
        self,
        path: Path,
        ask: Ask,
        delivery: Delivery,
        *,
        timeout_s: float,
        retried: Path | None = None,
        recomputes: bool = False,
    ) -> None:
        """One try on one path, ready or not; raises as `serve` does."""
        seats = [self._seated(path, name) for name in path.replicas]
        room = None if path.prefill is None else secrets.randbits(ROOM_BITS) or 1
        delivery.route(path, room, retried)
        calls = self._calls(path, seats, ask, room, timeout_s)
        with ExitStack() as occupied:
            for seat in seats:
                occupied.enter_context(seat.occupied())
            tried = Attempt(
                calls[-1],
                calls[0] if path.prefill is not None else None,
                room=room,
                stream=ask.stream,
                timeout_s=timeout_s,
                delivery=delivery,
                aborter=self._aborter,
                idle=HandoffProgress(self._roster, path, room or 0, self._refresh).idle_s,
                stopping=self.stopping,
                recomputes=recomputes,
                reports=lambda: self._roster.failed(room or 0),
            )
            occupied.enter_context(self.flights.flying(path, room, tried))
            try:
                await tried.run()
            except RequestFailed as failure:
                told = await self._explained(failure, room or 0)
                raise _placed(told, path, room) from None
            finally:
                if tried.absorbed is not None:
                    absorbed = explained(tried.absorbed, self._roster.failed(room or 0))
                    self._note(_placed(absorbed, path, room))

    async def _explained(self, failure: RequestFailed, room: int) -> RequestFailed:
        """With what the engines reported of the room. They tell their agents before they
        answer, so where an answer names no cause the report is asked for, bounded."""
        if room and is_unexplained(failure) and not self._roster.failed(room):
            await self._refresh()
        return explained(failure, self._roster.failed(room))

    def _calls(
        self, path: Path, seats: list[Seat], ask: Ask, room: int | None, timeout_s: float
    ) -> list[EngineCall]:
        specs = [spec_for(seat.state.engine) for seat in seats]
        if path.prefill is None or room is None:
            legs = [("alone", ask.body)]
        else:
            leg = self._leg(path, seats[0], room, timeout_s)
            legs = [
                ("prefill", {**specs[0].prefill_body(ask.body, leg), **ask.prefill_fields}),
                ("decode", specs[1].decode_body(ask.body, leg)),
            ]
        return [
            EngineCall(self._session, seat, spec, leg=name, endpoint=ask.endpoint, body=body)
            for seat, spec, (name, body) in zip(seats, specs, legs, strict=True)
        ]

    def _leg(self, path: Path, sender: Seat, room: int, timeout_s: float) -> Leg:
        prefill = path.prefill or ""
        expires_at_s = time.time() + timeout_s + sender.state.clock_offset_s
        ticket = mint(self._assignment.key, room, prefill, path.decode, self._digest, expires_at_s)
        return Leg(
            room=room,
            ticket=ticket,
            prefill=prefill,
            decode=path.decode,
            sender=sender.sender,
            timeout_s=timeout_s,
        )

    def _pick(self, ask: Ask, pin: str | None) -> Path:
        if pin is not None:
            path = pinned(pin, self._roster.pinnable)
            self._refuse(ask, path)
            state, cause = self._roster.state(path)
            if state != "ready":
                raise unready(path, cause or state)
            return path
        ready = self._roster.ready()
        if not ready:
            raise nothing_ready(
                (path, self._roster.state(path)[1] or "") for path in self._roster.paths
            )
        return self._choose(ask, preferred(ready))

    def _choose(self, ask: Ask, paths: tuple[Path, ...]) -> Path:
        """Of these, one whose engines honour the body; RequestFailed(400) where none does."""
        objected = [(path, objections(ask.body, path, self._specs(path))) for path in paths]
        able = [path for path, objection in objected if objection is None]
        if not able:
            raise next(objection for _, objection in objected if objection is not None)
        candidates = [self._roster.candidate(path) for path in able]
        return choose(candidates, self._policy, next(self._turns))

    def _refuse(self, ask: Ask, path: Path) -> None:
        objection = objections(ask.body, path, self._specs(path))
        if objection is not None:
            raise objection

    def _specs(self, path: Path) -> list[tuple[EngineSpec, Role]]:
        roles = [Role.BOTH] if path.prefill is None else [Role.PREFILL, Role.DECODE]
        return [
            (spec_for(self._assignment.plan.replica(name).engine), role)
            for name, role in zip(path.replicas, roles, strict=True)
        ]

    def _second(self, failure: RequestFailed, ask: Ask, pin: str | None, path: Path) -> Path | None:
        """The path of a second try: the same one when only an idle connection had gone stale
        (its engine saw nothing, and the room is new), another pair when a replica died."""
        if failure.stale and self._roster.state(path)[0] == "ready":
            return path
        if not failure.dead or pin is not None:
            return None
        others = tuple(
            other
            for other in self._roster.ready()
            if failure.replica not in other.replicas
            and (other.prefill is None) == (path.prefill is None)
        )
        try:
            return self._choose(ask, others) if others else None
        except RequestFailed:
            return None

    def _note(self, failure: RequestFailed) -> None:
        self._tally.failed(failure)
        seat = self._roster.seat(failure.replica or "")
        if seat is not None and failure.dead and not failure.stale and not seat.lost.is_set():
            self._roster.suspect(seat, failure.message)

    def _seated(self, path: Path, name: str) -> Seat:
        seat = self._roster.seat(name)
        if seat is None or seat.lost.is_set():
            cause = f"{name} is not running"
            if seat is not None:
                cause = f"{seat.called}: {seat.lost_cause}"
            raise unready(path, cause)
        return seat


def _placed(failure: RequestFailed, path: Path, room: int | None) -> RequestFailed:
    failure.path, failure.room = path.text, room
    return failure
