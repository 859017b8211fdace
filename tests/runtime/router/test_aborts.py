"""An engine that does not take an abort gets a second one, where that can help."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from runtime.router.cluster import CHAT, Cluster, cluster, eventually
from runtime.router.fakes import Answer, FakeEngine, cuts, fails, says, stalls_then

pytestmark = pytest.mark.anyio


async def failed_with(c: Cluster, abort: Answer) -> int:
    """One request whose prefill fails while decode waits; its room."""
    c["d0"].on |= {"decode": stalls_then(), "abort": abort}
    c["p0"].on["prefill"] = fails(502, "x", "protocol")
    answer = await c.ask(CHAT)
    assert answer.status == 502
    return int(answer.headers["x-pdctl-room"])


@pytest.mark.parametrize("how", [cuts, says(500, b""), says(503, b"busy")])
async def test_an_abort_that_was_not_taken_is_tried_again_once(how: Answer) -> None:
    """R14: whether the connection broke or the engine answered 5xx; then it is given up, and
    the closed connection of the leg is all that is left to end it."""
    async with cluster() as c:
        room = await failed_with(c, how)
        await eventually(lambda: len(c["d0"].aborted) == 2)
        await c.nothing_open()
        assert c["d0"].aborted == [room, room]


@pytest.mark.parametrize("status", [200, 404, 400])
async def test_an_abort_that_was_understood_is_not_repeated(status: int) -> None:
    """R14: a leg that is not there any more, or that the engine will not end, stays so."""
    async with cluster() as c:
        room = await failed_with(c, says(status, json.dumps({"aborted": False}).encode()))
        await c.nothing_open()
        assert c["d0"].aborted == [room]


async def test_a_replica_that_is_gone_gets_no_second_abort() -> None:
    """R14: the agent says that the process died; its room died with it."""
    async with cluster() as c:

        async def dies(
            engine: FakeEngine, request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            seat = c.router.roster.seat("d0")
            assert seat is not None
            c.keeper.set_state("d0", "backoff", "it was killed by signal 9")
            await seat.lost.wait()
            return await says(500, b"")(engine, request, body)

        room = await failed_with(c, dies)
        await c.nothing_open()
        assert c["d0"].aborted == [room]
