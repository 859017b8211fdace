"""Answers through pairs and ordinary replicas: what passes, what waits, what is counted."""

from __future__ import annotations

import asyncio
import json

import pytest
from runtime.router.cluster import CHAT, COMPLETION, cluster, eventually
from runtime.router.fakes import (
    DONE,
    KEEPALIVE,
    TEXT,
    chunk_of,
    events_of,
    stalls_then,
    streams,
    whole_of,
)

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("body", [CHAT, COMPLETION])
@pytest.mark.parametrize("names", ["p0 d0", "o0"])
async def test_an_answer_is_the_engines_own(body: dict, names: str) -> None:
    """R68: what the client reads is byte for byte what the decode engine (or the ordinary
    replica) sent, and headers name path and room."""
    async with cluster(names) as c:
        answer = await c.ask(body)
        assert answer.status == 200
        assert json.loads(await answer.read()) == whole_of(body)
        assert answer.headers["x-pdctl-path"] == names.replace(" ", ">")
        assert ("x-pdctl-room" in answer.headers) == (names == "p0 d0")


@pytest.mark.parametrize("names", ["p0 d0", "o0"])
async def test_a_stream_passes_byte_for_byte(names: str) -> None:
    """Chunks, usage and [DONE] are the engine's own; nothing is added."""
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with cluster(names) as c:
        answer = await c.ask(body)
        assert await answer.read() == b"".join(events_of(body))
        assert answer.headers["content-type"] == "text/event-stream"


async def test_both_legs_carry_one_leg_and_prefill_is_cut_to_one_token() -> None:
    """U23: the prefill copy has max_tokens and max_completion_tokens 1, is not streamed, and
    has no stream_options; the decode copy is the client's own; both name one room."""
    body = {
        **CHAT,
        "max_completion_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with cluster() as c:
        answer = await c.ask(body)
        (_, prefill), (_, decode) = c["p0"].bodies[0], c["d0"].bodies[0]
    assert prefill["pdctl"] == decode["pdctl"]
    assert prefill["pdctl"]["room"] == int(answer.headers["x-pdctl-room"])
    assert prefill["pdctl"]["prefill"] == "p0"
    assert prefill["pdctl"]["decode"] == "d0"
    assert prefill["pdctl"]["sender"] == "127.0.0.1:9"
    assert (prefill["max_tokens"], prefill["max_completion_tokens"]) == (1, 1)
    assert prefill["stream"] is False
    assert "stream_options" not in prefill
    assert {k: v for k, v in decode.items() if k != "pdctl"} == body


async def test_no_decode_chunk_leaves_before_prefill_succeeded() -> None:
    """R22, R31: decode has streamed everything; the client has no status until prefill is
    done, then gets all of it."""

    async with cluster() as c:
        c["p0"].on["prefill"] = stalls_then()
        served = c["d0"].served
        body = {**CHAT, "stream": True}
        pending = c.post("/v1/chat/completions", body)
        task = asyncio.ensure_future(pending)
        await c["p0"].stalled.wait()
        await eventually(lambda: c["d0"].served > served)
        assert not task.done()
        c["p0"].release.set()
        response = await task
        assert await response.read() == b"".join(events_of(body))


async def test_keepalives_and_empty_chunks_wait_for_the_first_output() -> None:
    """U36: comments and a role-only chunk reach the client together with the first output,
    unchanged; later comments pass as they are."""
    body = {**CHAT, "stream": True}
    first = KEEPALIVE + chunk_of(body, None)
    rest = [chunk_of(body, "a"), KEEPALIVE, chunk_of(body, None, "stop"), DONE]
    async with cluster("o0") as c:
        c["o0"].on["alone"] = streams(first, hang=True)
        task = asyncio.ensure_future(c.post("/v1/chat/completions", body))
        await c["o0"].stalled.wait()
        assert not task.done()
        task.cancel()
        await eventually(lambda: c["o0"].open == 0)
        c["o0"].on["alone"] = streams(first, *rest)
        answer = await c.ask(body)
        assert await answer.read() == first + b"".join(rest)


async def test_an_event_cut_into_pieces_arrives_whole() -> None:
    """However the engine's bytes are cut, the client gets the same bytes."""
    body = {**CHAT, "stream": True}
    whole = b"".join(events_of(body))
    pieces = [whole[at : at + 7] for at in range(0, len(whole), 7)]
    async with cluster("o0") as c:
        c["o0"].on["alone"] = streams(*pieces)
        answer = await c.ask(body)
        assert await answer.read() == whole
        assert all(text.encode() in whole for text in TEXT)


async def test_a_completed_request_is_not_aborted() -> None:
    """R24: after a whole answer and after a whole stream no engine gets an abort."""
    async with cluster() as c:
        await c.ask(CHAT)
        await c.ask({**CHAT, "stream": True})
        await c.nothing_open()
        assert c["p0"].aborted == []
        assert c["d0"].aborted == []


async def test_connections_to_engines_persist() -> None:
    """R38: ten requests in a row use one connection per replica."""
    async with cluster() as c:
        for _ in range(10):
            await c.ask({**CHAT, "stream": True})
            await c.nothing_open()
        assert c["p0"].connections <= 2
        assert c["d0"].connections <= 2
