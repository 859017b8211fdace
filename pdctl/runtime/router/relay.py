"""One request from its checked body to its last byte: path, tries, what is counted.

1. candidates: the pinned path, or the ready ones whose engines honour the body
2. one of them is chosen (choosing.py); a room and a ticket are minted for it. Where there is no
   choice, what `policy = "prefix"` reads of the prompt is read while the engines work
3. both legs start (attempt.py); the answer goes to the delivery
4. a replica that died before the first byte: one more try on another pair, new room
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import aiohttp
import anyio

from pdctl.engines.channel import RouterAssignment
from pdctl.engines.interface import Leg
from pdctl.engines.registry import spec_for
from pdctl.handoff.ticket import mint
from pdctl.runtime.router.aborts import Aborter
from pdctl.runtime.router.affinity import Affinity
from pdctl.runtime.router.attempt import Attempt
from pdctl.runtime.router.blame import explained, is_unexplained
from pdctl.runtime.router.choosing import Chooser
from pdctl.runtime.router.delivery import ClientGone, Delivery
from pdctl.runtime.router.failure import RequestFailed
from pdctl.runtime.router.judge import Judge
from pdctl.runtime.router.legs import EngineCall
from pdctl.runtime.router.members import Roster, Seat
from pdctl.runtime.router.policy import Path, unready
from pdctl.runtime.router.progress import HandoffProgress
from pdctl.runtime.router.recent import Flights
from pdctl.runtime.router.request import Ask
from pdctl.topology.model import OnFailure

log = logging.getLogger("pdctl.router")

ROOM_BITS = 62


class Tally(Protocol):
    """Where failures are counted."""

    def failed(self, failure: RequestFailed) -> None: ...

    def decided(self, path: str, reason: str) -> None: ...


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
        self._affinity = Affinity(assignment, roster)
        self.judge = Judge(assignment, roster, self._affinity.held_tokens)
        self._chooser = Chooser(roster, self.judge, self._affinity, tally.decided)
        self.adopt(assignment)

    def adopt(self, assignment: RouterAssignment) -> None:
        """What holds for every request from now on."""
        self._assignment = assignment
        self._digest = assignment.contract.digest
        self._recomputes = assignment.on_failure is OnFailure.RECOMPUTE
        self.judge.adopt(assignment)
        self._affinity.adopt(assignment)

    async def serve(self, ask: Ask, pin: str | None, delivery: Delivery) -> None:
        """Answers one request.

        Raises:
            RequestFailed: what the client should be told.
            ClientGone: the client closed its connection.
        """
        try:
            weighed = self._chooser.weighs(pin)
            if weighed:
                ask = await self._affinity.keyed(ask)
            path = self._chooser.pick(ask, pin, delivery)
        except RequestFailed as failure:
            self._note(failure)
            raise
        if weighed or not self._affinity.reads:
            self._affinity.sent(path, ask)
            await self._tried(path, ask, pin, delivery)
            return
        failed: RequestFailed | ClientGone | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._remember, path, ask)
            try:
                await self._tried(path, ask, pin, delivery)
            except (RequestFailed, ClientGone) as failure:
                failed = failure
        if failed is not None:
            raise failed

    async def _remember(self, path: Path, ask: Ask) -> None:
        """Prompts are read in turn: whoever asks later finds this one."""
        self._affinity.sent(path, await self._affinity.keyed(ask))

    async def _tried(self, path: Path, ask: Ask, pin: str | None, delivery: Delivery) -> None:
        timeout_s = self._assignment.plan.timeout_s
        try:
            await self.attempt(
                path, ask, delivery, timeout_s=timeout_s, recomputes=self._recomputes
            )
            return
        except RequestFailed as failure:
            self._note(failure)
            second = None
            if not delivery.begun:
                second = self._chooser.second(failure, ask, pin, path, delivery)
            if second is None:
                raise
            log.info("second try path=%s after=%s", second.text, failure.message)
        self._affinity.sent(second, ask)
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
            timed = occupied.enter_context(self.judge.timing(path, ask, delivery))
            tried = Attempt(
                calls[-1],
                calls[0] if path.prefill is not None else None,
                room=room,
                stream=ask.stream,
                timeout_s=timeout_s,
                delivery=timed,
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
        call = partial(EngineCall, self._session, endpoint=ask.endpoint)
        if path.prefill is None or room is None:
            return [call(seats[0], specs[0], leg="alone", body=ask.body)]
        leg = self._leg(path, seats[0], room, timeout_s)
        sent = {**specs[0].prefill_body(ask.body, leg), **ask.prefill_fields}
        make = partial(specs[1].decode_body, ask.body, leg)
        if leg.native and specs[1].prefills_first:
            decode = call(seats[1], specs[1], leg="decode", body={}, follow=make)
        else:
            decode = call(seats[1], specs[1], leg="decode", body=make())
        return [call(seats[0], specs[0], leg="prefill", body=sent), decode]

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
            native=self._assignment.plan.replica(path.decode).native,
        )

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
