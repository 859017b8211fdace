"""One try of one request on one path: both legs at once, one deadline, one outcome. (vLLM's own
handoff alone runs prefill, then decode.)

The rules (DESIGN §7): no byte of the decode leg leaves before prefill has succeeded; either
leg's failure ends the other at once; decode done first still awaits prefill; whatever ends
the try, both connections are closed and what an engine may still run is aborted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
from anyio.abc import TaskGroup

from pdctl.engines.channel import Failed
from pdctl.runtime.router.aborts import Aborter
from pdctl.runtime.router.blame import blame, is_echo
from pdctl.runtime.router.delivery import ClientGone, Delivery
from pdctl.runtime.router.failure import RequestFailed
from pdctl.runtime.router.legs import EngineCall
from pdctl.runtime.router.policy import Path
from pdctl.runtime.router.stream import Kind

ECHO_GRACE_S = 0.25
"""How long an echo ("peer lost") waits for the failure that it mirrors."""

EXPIRY_GRACE_S = 0.5
"""For the engines to end an expired handoff themselves: they look each quarter second."""

DRAIN_S = 1.0


class Attempt:
    """Drives the legs of one try.

    Args:
        decode: the leg whose answer the client sees (on an ordinary replica, the only one).
        prefill: the other one, or None.
        room: what aborts name; None without a handoff.
        timeout_s: the deadline, counted from the last progress.
        idle: asks the engines for the seconds since the request's last progress inside them;
            None where they have nothing of it, or can't be asked.
        stopping: set when the router ends, and with it every try.
        recomputes: `on_failure = "recompute"`: prefill's failure leaves the decode leg open,
            which then computes the prompt itself. The failure is kept in `absorbed`.
        reports: what the engines have reported about the handoff so far.
    """

    def __init__(
        self,
        decode: EngineCall,
        prefill: EngineCall | None,
        *,
        room: int | None,
        stream: bool,
        timeout_s: float,
        delivery: Delivery,
        aborter: Aborter,
        idle: Callable[[], Awaitable[float | None]],
        stopping: anyio.Event,
        recomputes: bool = False,
        reports: Callable[[], Sequence[Failed]] = tuple,
    ) -> None:
        self._decode = decode
        self._prefill = prefill
        self._calls = (decode,) if prefill is None else (prefill, decode)
        self._room = room
        self._stream = stream
        self._timeout_s = timeout_s
        self._delivery = delivery
        self._aborter = aborter
        self._idle = idle
        self._stopping = stopping
        self._recomputes = recomputes
        self._reports = reports
        self.absorbed: RequestFailed | None = None
        self._prefilled = anyio.Event()
        self._answer = b""
        self._failures: list[RequestFailed] = []
        self._gone = False
        self._served = False
        self._deadline = 0.0

    @property
    def prefilled(self) -> bool:
        """Whether prefill has answered, or there is none."""
        return self._prefilled.is_set()

    async def run(self) -> None:
        """Until the whole answer has been delivered.

        Raises:
            RequestFailed: what the client should be told.
            ClientGone: there is no client any more.
        """
        try:
            async with anyio.create_task_group() as tasks:
                self._start(tasks)
        finally:
            self._close()
        if self._gone:
            raise ClientGone
        if self._failures:
            raise blame(self._failures)

    def _start(self, tasks: TaskGroup) -> None:
        self._renew()
        tasks.start_soon(self._expire, tasks)
        tasks.start_soon(self._stop, tasks)
        for call in self._calls:
            tasks.start_soon(self._watch, call, tasks)
        if self._prefill is None:
            self._prefilled.set()
        else:
            tasks.start_soon(self._run_prefill, self._prefill, tasks)
        tasks.start_soon(self._run_decode, self._decode, tasks)

    async def _run_prefill(self, call: EngineCall, tasks: TaskGroup) -> None:
        try:
            await call.send()
            self._answer = await call.whole()
            self._delivery.prefilled(self._answer)
        except RequestFailed as failure:
            self._fail(failure, tasks)
        else:
            self._renew()
            self._prefilled.set()

    def _absorb(self, failure: RequestFailed) -> None:
        """Prefill failed and decode goes on alone."""
        self.absorbed = self.absorbed or failure
        self._delivery.recomputed(Path(None, self._decode.seat.name))
        self._renew()
        self._prefilled.set()

    async def _run_decode(self, call: EngineCall, tasks: TaskGroup) -> None:
        try:
            if call.follows:
                await self._prefilled.wait()
                call.take(self._answer)
            await call.send()
            if self._stream:
                await self._relay_events(call)
            else:
                body = await call.whole()
                await self._prefill_over()
                await self._delivery.whole(body, call.content_type)
        except RequestFailed as failure:
            self._fail(failure, tasks)
        except ClientGone:
            self._gone = True
            tasks.cancel_scope.cancel()
        else:
            self._served = True
            tasks.cancel_scope.cancel()

    async def _relay_events(self, call: EngineCall) -> None:
        await self._relay_first(call)
        while not call.finished:
            event = await call.event()
            if event is None:
                raise call.truncated()
            if event.kind is Kind.ERROR:
                raise call.told(event)
            self._renew()
            call.finished = event.kind is Kind.DONE
            await self._delivery.event(event.raw)
        await self._delivery.end()
        with anyio.move_on_after(DRAIN_S):
            await call.drain()

    async def _relay_first(self, call: EngineCall) -> None:
        """Reads up to the first output before the client gets a status; what comes before
        it (comments, an empty chunk) leaves together with it (U36)."""
        held = bytearray()
        while True:
            event = await call.event()
            if event is None:
                raise call.truncated()
            self._renew()
            if event.kind is Kind.ERROR:
                raise call.told(event)
            if event.kind is Kind.DONE:
                raise call.unanswered()
            held += event.raw
            if event.kind is Kind.CONTENT:
                break
        await self._prefill_over()
        await self._delivery.event(bytes(held))

    async def _prefill_over(self) -> None:
        """Prefill has succeeded, or decode goes on without it. An engine that answers prefill
        before Done (vLLM, at its first token) leaves a later failure to the reports (R72)."""
        await self._prefilled.wait()
        if not self._recomputes or self.absorbed is not None:
            return
        for report in self._reports():
            if report.leg == self._decode.leg:
                self._absorb(self._decode.recomputed(report))
                return

    async def _watch(self, call: EngineCall, tasks: TaskGroup) -> None:
        await call.seat.lost.wait()
        if not call.finished:
            self._fail(call.lost(call.seat.lost_cause), tasks)

    async def _stop(self, tasks: TaskGroup) -> None:
        await self._stopping.wait()
        self._failures.append(RequestFailed(503, "the router was stopped", code="router_stopped"))
        tasks.cancel_scope.cancel()

    async def _expire(self, tasks: TaskGroup) -> None:
        while True:
            left_s = self._deadline - anyio.current_time()
            if left_s > 0:
                await anyio.sleep(left_s)
                continue
            idle_s = None if self._prefill is None else await self._idle()
            if idle_s is None or idle_s >= self._timeout_s:
                # their deadline is this one, and they know more of the cause
                await anyio.sleep(0.0 if self._prefill is None else EXPIRY_GRACE_S)
                break
            self._renew(idle_s)
        late = next((call for call in self._calls if not call.finished), self._decode)
        self._fail(late.expired(self._timeout_s), tasks)

    def _renew(self, idle_s: float = 0.0) -> None:
        until_s = anyio.current_time() + self._timeout_s - idle_s
        self._deadline = max(self._deadline, until_s)

    def _fail(self, failure: RequestFailed, tasks: TaskGroup) -> None:
        """Ends the try; an echo first leaves the other leg a moment to say what happened."""
        if self._recomputes and failure.leg == "prefill":
            self._absorb(failure)
            return
        first = not self._failures
        self._failures.append(failure)
        if first and is_echo(failure) and len(self._calls) > 1:
            tasks.start_soon(self._end_soon, failure, tasks)
        else:
            tasks.cancel_scope.cancel()

    async def _end_soon(self, echo: RequestFailed, tasks: TaskGroup) -> None:
        """At once where the other leg's replica is lost, also one that had answered."""
        other = next(call for call in self._calls if call.leg != echo.leg)
        with anyio.move_on_after(ECHO_GRACE_S):
            await other.seat.lost.wait()
            self._failures.append(other.lost(other.seat.lost_cause))
        tasks.cancel_scope.cancel()

    def _close(self) -> None:
        """Closes both connections and has unfinished legs aborted; waits for nothing, so a
        second cancellation cannot interrupt it. Where decode follows prefill, what prefill keeps
        is the engine's own to let go."""
        for call in self._unfinished():
            if self._room is not None and call.reached:
                self._aborter.abort(call.seat, call.spec, self._room)
        prefill, handed_over = self._prefill, self._served and self.absorbed is None
        refused = prefill is not None and prefill.finished and not self._prefilled.is_set()
        over = refused or handed_over or self._decode.follows
        if prefill is not None and prefill.reached and not over:
            self._aborter.release(prefill.seat, prefill.spec, self._room or 0)
        for call in self._calls:
            call.close()

    def _unfinished(self) -> Sequence[EngineCall]:
        return [call for call in self._calls if not call.finished]
