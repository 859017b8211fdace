"""The client goes away at every point where a leg can stall; nothing stays open."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from runtime.router.cluster import CHAT, cluster, eventually
from runtime.router.fakes import (
    KEEPALIVE,
    Answer,
    FakeEngine,
    chunk_of,
    half_a_body,
    opened,
    says,
    stall,
    stalls_then,
    streams,
)

pytestmark = pytest.mark.anyio

STREAM = {**CHAT, "stream": True}


async def headers_then_stall(
    engine: FakeEngine, request: web.Request, body: dict
) -> web.StreamResponse:
    response = await opened(request)
    await stall(engine)
    return response


POINTS: dict[str, tuple[str, dict, Answer]] = {
    "prefill before its status": ("prefill", CHAT, stalls_then()),
    "prefill before its status, streaming": ("prefill", STREAM, stalls_then()),
    "prefill in its body": ("prefill", CHAT, half_a_body(hang=True)),
    "prefill in its error body": ("prefill", STREAM, half_a_body(hang=True)),
    "decode before its status": ("decode", CHAT, stalls_then()),
    "decode before its status, streaming": ("decode", STREAM, stalls_then()),
    "decode in its body": ("decode", CHAT, half_a_body(hang=True)),
    "decode after its headers": ("decode", STREAM, headers_then_stall),
    "decode after a comment": ("decode", STREAM, streams(KEEPALIVE, hang=True)),
    "decode after an empty chunk": ("decode", STREAM, streams(chunk_of(CHAT, None), hang=True)),
    "decode after its first chunk": ("decode", STREAM, streams(chunk_of(CHAT, "a"), hang=True)),
    "decode inside an event": (
        "decode",
        STREAM,
        streams(chunk_of(CHAT, "a"), b'data: {"id"', hang=True),
    ),
}
LEG_REPLICA = {"prefill": "p0", "decode": "d0"}


async def given_up(c, body: dict, engine: FakeEngine, **headers: str) -> None:
    """Sends a request, waits until that engine stalls, and closes the client's connection."""
    task = asyncio.ensure_future(c.ask(body, **headers))
    await engine.stalled.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("point", POINTS)
async def test_a_client_that_leaves_ends_both_legs(point: str) -> None:
    """R15, R17, U5, U34: at this stall point the client closes; every leg that had not ended
    is closed and aborted once, none twice, and the next request is served (U1, U6, U7)."""
    leg, body, answer = POINTS[point]
    async with cluster() as c:
        stalling = c[LEG_REPLICA[leg]]
        stalling.on[leg] = answer
        await given_up(c, body, stalling)
        await eventually(lambda: len(stalling.aborted) == 1 and stalling.open == 0)
        await c.nothing_open()
        rooms = {b["pdctl"]["room"] for e in c.engines.values() for _, b in e.bodies}
        assert set(stalling.aborted) == rooms
        assert all(len(engine.aborted) <= 1 for engine in c.engines.values())
        del stalling.on[leg]
        assert (await c.ask(body)).status == 200


async def test_both_engines_are_aborted_when_both_still_run() -> None:
    """R15: client gone while prefill computes and decode waits: both get the room's abort."""
    async with cluster() as c:
        c["p0"].on["prefill"] = stalls_then()
        c["d0"].on["decode"] = stalls_then()
        task = asyncio.ensure_future(c.ask(STREAM))
        await c["p0"].stalled.wait()
        await c["d0"].stalled.wait()
        task.cancel()
        await eventually(lambda: len(c["p0"].aborted) == len(c["d0"].aborted) == 1)
        assert c["p0"].aborted == c["d0"].aborted
        await eventually(lambda: c["p0"].open == c["d0"].open == 0)


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_a_client_of_an_ordinary_replica_that_leaves_closes_its_connection(
    body: dict,
) -> None:
    """U34: without a handoff the closed connection is the abort; no room is named."""
    async with cluster("o0") as c:
        c["o0"].on["alone"] = stalls_then()
        await given_up(c, body, c["o0"])
        await eventually(lambda: c["o0"].open == 0)
        assert c["o0"].aborted == []


async def test_an_abort_that_hangs_is_bounded_and_blocks_nobody() -> None:
    """R17, R23: the engine never answers the abort; other requests go on meanwhile."""
    async with cluster() as c:
        c["d0"].on["decode"] = stalls_then()
        c["d0"].on["abort"] = stalls_then()
        await given_up(c, CHAT, c["d0"])
        await eventually(lambda: len(c["d0"].aborted) == 1)
        del c["d0"].on["decode"]
        assert (await c.ask(CHAT)).status == 200


async def test_a_failing_abort_does_not_mask_the_error() -> None:
    """R18: the abort fails; the client still reads the first error."""
    async with cluster() as c:
        c["d0"].on["decode"] = stalls_then()
        c["d0"].on["abort"] = says(500, b"no")
        c["p0"].on["prefill"] = says(502, b'{"error": {"message": "first", "code": "protocol"}}')
        answer = await c.ask(CHAT)
        assert b"first" in await answer.read()


async def test_one_clients_leaving_leaves_other_requests_alone() -> None:
    """R19: two streams on one pair; one client leaves; the other stream ends complete."""
    async with cluster() as c:
        c["d0"].on["decode"] = streams(chunk_of(CHAT, "a"), hang=True)
        first = await c.post("/v1/chat/completions", STREAM)
        second = await c.post("/v1/chat/completions", STREAM)
        await eventually(lambda: c["d0"].open == 2)
        first.close()
        await eventually(lambda: len(c["d0"].aborted) == 1 and c["d0"].open == 1)
        assert c["d0"].aborted == [int(first.headers["x-pdctl-room"])]
        assert not second.content.at_eof()
        second.close()


async def test_hundred_clients_that_leave_leave_nothing() -> None:
    """U7: a hundred clients leave at different points; no slot, task or connection is left
    and the next request is right."""
    async with cluster() as c:
        points = list(POINTS.values())
        tasks = []
        for at in range(96):
            leg, body, answer = points[at % len(points)]
            c[LEG_REPLICA[leg]].on = {leg: answer}
            before = len(c[LEG_REPLICA[leg]].bodies)
            tasks.append(asyncio.ensure_future(c.ask(body)))
            await eventually(lambda n=LEG_REPLICA[leg], b=before: len(c[n].bodies) > b)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await c.nothing_open()
        for engine in c.engines.values():
            engine.on.clear()
        assert (await c.ask(STREAM)).status == 200
