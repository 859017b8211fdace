"""What a client is told where only the engine's agent knows the cause."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from runtime.router.cluster import (
    CHAT,
    COMPLETION,
    PATIENCE_S,
    STREAM,
    Cluster,
    cluster,
    error_of,
    eventually,
)
from runtime.router.fakes import (
    DONE,
    Answer,
    FakeEngine,
    chunk_of,
    fails,
    says,
    stalls_then,
    streams,
    usage_chunk,
)

from pdctl.engines.channel import Failed
from pdctl.engines.mlx.spec import MlxSpec
from pdctl.runtime.router import attempt
from pdctl.topology.model import OnFailure

pytestmark = pytest.mark.anyio

BODIES = pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])


def reports(c: Cluster, then: Answer, **fields: str) -> Answer:
    """The engine tells its agent why, whom the router hears only when it asks, then answers."""

    async def answer(engine: FakeEngine, request: Any, body: dict) -> Any:
        c.keeper.failures = (Failed(room=body["pdctl"]["room"], **fields),)
        return await then(engine, request, body)

    return answer


@BODIES
async def test_an_engine_that_answers_no_cause_is_asked_for_it(body: dict) -> None:
    """R67: vLLM says 500 to every failed handoff; its agent knows the cause."""
    async with cluster() as c:
        c["p0"].on["prefill"] = stalls_then()
        failed = says(500, b"Internal Server Error")
        c["d0"].on["decode"] = reports(c, failed, leg="decode", cause="tokens", detail="differ")
        answer = await c.ask(body)
        error = error_of(await answer.read())
        assert (answer.status, error["code"]) == (502, "tokens")
        assert error["message"] == 'decode replica "d0": differ'
        assert 'cause="tokens",leg="decode"' in c.router.meter.text().decode()


async def test_a_prompt_over_the_budget_is_the_clients_mistake_on_any_engine() -> None:
    """R40: 400, and nothing of the engine's 500."""
    async with cluster() as c:
        failed = says(500, b"Internal Server Error")
        fields = {"leg": "prefill", "cause": "over_budget", "detail": "too many tokens"}
        c["p0"].on["prefill"] = reports(c, failed, **fields)
        c["d0"].on["decode"] = stalls_then()
        answer = await c.ask(CHAT)
        error = error_of(await answer.read())
        assert (answer.status, error["code"]) == (400, "over_budget")
        assert (error["message"], error["type"]) == ("too many tokens", "invalid_request_error")


@pytest.mark.parametrize(("body", "param"), [(CHAT, "messages"), (COMPLETION, "prompt")])
async def test_a_prompt_that_is_too_long_is_named_as_the_client_named_it(
    body: dict, param: str
) -> None:
    """U18: vLLM calls it input_tokens, whichever field it came in."""
    error = {"message": "too long", "type": "BadRequestError", "param": "input_tokens", "code": 400}
    async with cluster() as c:
        c["d0"].on["decode"] = says(400, json.dumps({"error": error}).encode())
        answer = await c.ask(body)
        assert answer.status == 400
        assert error_of(await answer.read())["param"] == param


async def test_a_prefill_that_had_answered_is_blamed_when_it_dies_in_the_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R67: decode lost its peer; the client is told which replica that was."""
    monkeypatch.setattr(attempt, "ECHO_GRACE_S", PATIENCE_S)
    async with cluster() as c:
        c["d0"].on["decode"] = stalls_then(fails(502, "the peer went away", "peer_lost"))
        task = asyncio.ensure_future(c.ask(CHAT))
        await c["d0"].stalled.wait()
        await eventually(lambda: c["p0"].served > 0 and c["p0"].open == 0)
        c["d0"].release.set()
        c.keeper.set_state("p0", "backoff", "it was killed by signal 9")
        answer = await task
        error = error_of(await answer.read())
        assert (answer.status, error["code"]) == (502, "replica_lost")
        assert error["message"] == 'prefill replica "p0": it went away (it was killed by signal 9)'


@BODIES
async def test_a_prompt_computed_again_after_prefill_had_answered_is_told(body: dict) -> None:
    """R72: vLLM's prefill answers at its first token; a handoff that fails after that is
    reported by decode, and the answer says who made it."""
    async with cluster(on_failure=OnFailure.RECOMPUTE) as c:
        c["d0"].on["decode"] = stalls_then()
        task = asyncio.ensure_future(c.ask(body))
        await c["d0"].stalled.wait()
        room = c["d0"].bodies[-1][1]["pdctl"]["room"]
        c.keeper.failures = (Failed(room=room, leg="decode", cause="peer_lost", detail="x"),)
        c.keeper.push()
        await eventually(lambda: bool(c.router.roster.failed(room)))
        c["d0"].release.set()
        answer = await task
        assert (answer.status, answer.headers["x-pdctl-path"]) == (200, "d0")
        await c.nothing_open()
        assert 'cause="peer_lost",leg="decode"' in c.router.meter.text().decode()


@BODIES
async def test_what_an_answered_prefill_still_holds_is_released(
    body: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U2: decode refuses before it dials; vLLM's prefill would keep its pages to the deadline."""
    monkeypatch.setattr(MlxSpec, "release", lambda spec, room: ("/pdctl/abort", {"room": room}))
    async with cluster() as c:
        c["d0"].on["decode"] = stalls_then(says(400, b'{"error": {"message": "no"}}'))
        task = asyncio.ensure_future(c.ask(body))
        await c["d0"].stalled.wait()
        await eventually(lambda: c["p0"].served > 0 and c["p0"].open == 0)
        c["d0"].release.set()
        answer = await task
        assert answer.status == 400
        room = int(answer.headers["x-pdctl-room"])
        await eventually(lambda: c["p0"].aborted == [room])


async def test_what_prefill_holds_is_released_when_its_client_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """U5: its answer may be on the way, so that closing its connection ends nothing there."""
    monkeypatch.setattr(MlxSpec, "abort", lambda spec, room: None)
    monkeypatch.setattr(MlxSpec, "release", lambda spec, room: ("/pdctl/abort", {"room": room}))
    async with cluster() as c:
        c["p0"].on["prefill"] = stalls_then()
        c["d0"].on["decode"] = stalls_then()
        task = asyncio.ensure_future(c.ask(STREAM))
        await c["p0"].stalled.wait()
        task.cancel()
        await eventually(lambda: len(c["p0"].aborted) == 1)
        assert c["d0"].aborted == []


async def test_a_prefill_that_was_handed_over_is_not_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R24: nothing is left to end."""
    monkeypatch.setattr(MlxSpec, "release", lambda spec, room: ("/pdctl/abort", {"room": room}))
    async with cluster() as c:
        assert (await c.ask(CHAT)).status == 200
        await c.nothing_open()
        assert c["p0"].aborted == []


@pytest.mark.parametrize("before", [(), (usage_chunk(CHAT),)], ids=["done", "usage"])
async def test_a_stream_with_no_answer_in_it_is_no_success(before: tuple[bytes, ...]) -> None:
    """R63, U29: vLLM's stream of a request whose handoff failed: 200, perhaps the usage, [DONE]."""
    async with cluster() as c:
        empty = streams(*before, DONE)
        c["d0"].on["decode"] = reports(c, empty, leg="decode", cause="tokens", detail="differ")
        answer = await c.ask(STREAM)
        error = error_of(await answer.read())
        assert (answer.status, error["code"]) == (502, "tokens")
        assert error["message"] == 'decode replica "d0": differ'


async def test_an_error_in_mid_stream_is_the_last_event() -> None:
    """R63: vLLM sends [DONE] after its error; the client is told the leg, and no [DONE]."""
    wrong = b'data: {"error": {"message": "the engine broke", "code": 500}}\n\n'
    async with cluster() as c:
        c["d0"].on["decode"] = streams(chunk_of(CHAT, "a"), wrong, DONE)
        answer = await c.ask(STREAM)
        *_, last = (await answer.read()).strip().split(b"\n\n")
        error = error_of(last.removeprefix(b"data: "))
        assert error["message"] == 'decode replica "d0": the engine broke'
