"""What a client is told when an engine fails, and that the other leg is ended at once."""

from __future__ import annotations

import asyncio
import json

import pytest
from runtime.router.cluster import (
    CHAT,
    COMPLETION,
    PATIENCE_S,
    STREAM,
    cluster,
    error_of,
    eventually,
)
from runtime.router.fakes import (
    DONE,
    answers,
    chunk_of,
    cuts,
    events_of,
    fails,
    half_a_body,
    opened,
    says,
    stall,
    stalls_then,
    streams,
)

from pdctl.runtime.router import attempt
from pdctl.topology.model import OnFailure

pytestmark = pytest.mark.anyio

BODIES = pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])


def last_event(raw: bytes) -> dict:
    return json.loads(raw.strip().split(b"\n\n")[-1].removeprefix(b"data: "))


@BODIES
async def test_prefill_failure_closes_the_decode_leg_at_once(body: dict) -> None:
    """R21, R67: prefill answers 502 while decode waits; the client is told prefill, its
    replica and cause, and decode is closed and aborted."""
    async with cluster() as c:
        c["d0"].on["decode"] = stalls_then()
        c["p0"].on["prefill"] = fails(502, "the copy is gone", "handoff")
        answer = await c.ask(body)
        error = error_of(await answer.read())
        assert answer.status == 502
        assert error["message"].startswith('prefill replica "p0": the copy is gone')
        assert error["code"] == "handoff"
        assert answer.headers["x-pdctl-path"] == "p0>d0"
        room = int(answer.headers["x-pdctl-room"])
        await eventually(lambda: c["d0"].aborted == [room] and c["d0"].open == 0)
        assert c["p0"].aborted == []


@BODIES
async def test_a_cause_has_its_own_status_whatever_the_engine_says(body: dict) -> None:
    """R40: SGLang answers a prompt that can never fit with a 500; it is the client's mistake, and
    counts against nobody's health."""
    async with cluster() as c:
        c["d0"].on["decode"] = stalls_then()
        c["p0"].on["prefill"] = fails(500, "it does not fit", "over_budget")
        answer = await c.ask(body)
        error = error_of(await answer.read())
        assert (answer.status, error["type"]) == (400, "invalid_request_error")
        assert (error["message"], error["code"]) == ("it does not fit", "over_budget")


TOO_LONG = (
    "The input (2100 tokens) is longer than the model's context length (2048 tokens).",
    "Requested token count exceeds the model's maximum context length of 2048 tokens.",
)


@pytest.mark.parametrize("words", TOO_LONG)
async def test_a_prompt_over_the_context_is_named_whatever_the_engine_says(words: str) -> None:
    """SGLang's 400 names no parameter: the client's own field is; what it says of anything else is
    passed on as it is."""
    async with cluster("ps0 d0") as c:
        c["ps0"].on["prefill"] = fails(400, words, None)
        for body, field in ((CHAT, "messages"), (COMPLETION, "prompt")):
            answer = await c.ask(body)
            error = error_of(await answer.read())
            assert (answer.status, error["param"], error["message"]) == (400, field, words)
        c["ps0"].on["prefill"] = fails(400, "top_p must be in (0, 1]", None)
        assert error_of(await (await c.ask(CHAT)).read())["param"] is None


@BODIES
async def test_decode_failure_closes_the_prefill_leg_at_once(body: dict) -> None:
    """U2: decode rejects before admission while prefill computes; prefill is aborted."""
    async with cluster() as c:
        c["p0"].on["prefill"] = stalls_then()
        c["d0"].on["decode"] = fails(502, "no room", "protocol")
        answer = await c.ask(body)
        error = error_of(await answer.read())
        assert (answer.status, error["code"]) == (502, "protocol")
        assert error["message"].startswith('decode replica "d0"')
        room = int(answer.headers["x-pdctl-room"])
        await eventually(lambda: c["p0"].aborted == [room] and c["p0"].open == 0)


async def test_decode_done_first_still_awaits_prefill_and_shows_its_error() -> None:
    """R22, R72: the decode leg streamed to [DONE]; prefill then fails; the client gets
    prefill's error and no decode byte."""
    async with cluster() as c:
        c["p0"].on["prefill"] = stalls_then(fails(502, "lost pages", "protocol"))
        served = c["d0"].served
        task = asyncio.ensure_future(c.ask(STREAM))
        await c["p0"].stalled.wait()
        await eventually(lambda: c["d0"].served > served)
        c["p0"].release.set()
        answer = await task
        assert answer.status == 502
        assert "lost pages" in error_of(await answer.read())["message"]


async def test_prefill_fails_after_the_decode_stream_began_upstream() -> None:
    """R21: decode has sent chunks (held back) when prefill fails: 502, decode closed."""
    async with cluster() as c:
        c["d0"].on["decode"] = streams(chunk_of(CHAT, "a"), hang=True)
        c["p0"].on["prefill"] = stalls_then(fails(502, "x", "protocol"))
        task = asyncio.ensure_future(c.ask(STREAM))
        await c["d0"].stalled.wait()
        await c["p0"].stalled.wait()
        c["p0"].release.set()
        answer = await task
        assert answer.status == 502
        await eventually(lambda: c["d0"].open == 0 and len(c["d0"].aborted) == 1)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_engines_4xx_stays_and_never_counts_against_its_health(leg: str) -> None:
    """U18, U20: a 400 of either leg reaches the client as it is, with its parameter; after
    fifty of them the path still serves."""
    name = {"prefill": "p0", "decode": "d0"}[leg]
    error = {"message": "too long", "type": "t", "param": "messages", "code": "context"}
    async with cluster() as c:
        c[name].on[leg] = says(400, json.dumps({"error": error}).encode())
        for _ in range(50):
            answer = await c.ask(CHAT)
            assert answer.status == 400
        told = error_of(await answer.read())
        assert (told["message"], told["param"], told["code"]) == ("too long", "messages", "context")
        assert told["type"] == "invalid_request_error"
        del c[name].on[leg]
        assert (await c.ask(CHAT)).status == 200


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (400, b'{"error": "plain words"}', "plain words"),
        (404, b"Not Found", "Not Found"),
        (500, b"<html>oops</html>", "oops"),
        (500, b"", "HTTP 500"),
        (503, b'{"error": {"message": "busy"}}', "busy"),
        (422, b"\xff\xfe", "�"),
        (500, b"[" * 5000, "["),
    ],
)
async def test_error_bodies_of_any_form_become_openais(status: int, body: bytes, said: str) -> None:
    """4xx stays 4xx, 503 stays, other 5xx become 502; the text is kept."""
    async with cluster("o0") as c:
        c["o0"].on["alone"] = says(status, body, "text/html")
        answer = await c.ask(CHAT)
        assert answer.status == (status if status < 500 or status == 503 else 502)
        assert said in error_of(await answer.read())["message"]


@pytest.mark.parametrize("leg", ["prefill", "decode", "alone"])
@pytest.mark.parametrize("how", [cuts, half_a_body(hang=False)], ids=["status", "body"])
async def test_a_broken_connection_is_a_502_that_names_the_leg(leg: str, how: object) -> None:
    """R63, R67: a connection that breaks before the status or in the body is never success."""
    name = {"prefill": "p0", "decode": "d0", "alone": "o0"}[leg]
    async with cluster("o0" if leg == "alone" else "p0 d0") as c:
        c[name].on[leg] = how
        answer = await c.ask(CHAT)
        error = error_of(await answer.read())
        assert (answer.status, error["code"]) == (502, "replica_lost")
        assert f'replica "{name}"' in error["message"]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_the_dead_leg_is_blamed_and_not_its_echo(
    leg: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R67: one replica dies; the other one reports a lost peer first; the client is told the
    dead one."""
    monkeypatch.setattr(attempt, "ECHO_GRACE_S", PATIENCE_S)
    dead, other = ("p0", "d0") if leg == "prefill" else ("d0", "p0")
    other_leg = "decode" if leg == "prefill" else "prefill"
    async with cluster() as c:
        c[dead].on[leg] = stalls_then()
        c[other].on[other_leg] = fails(502, "the peer went away", "peer_lost")
        task = asyncio.ensure_future(c.ask(CHAT))
        await c[dead].stalled.wait()
        await c[dead].kill()
        answer = await task
        assert answer.status in (502, 503)
        assert f'{leg} replica "{dead}"' in error_of(await answer.read())["message"]


async def test_an_echo_without_a_cause_is_told_after_its_grace() -> None:
    """Both replicas live and decode lost its peer: the client is told that, soon."""
    async with cluster() as c:
        c["p0"].on["prefill"] = stalls_then()
        c["d0"].on["decode"] = fails(502, "the peer went away", "peer_lost")
        answer = await c.ask(CHAT)
        assert error_of(await answer.read())["code"] == "peer_lost"


@pytest.mark.parametrize(
    ("pieces", "cut"),
    [
        ((chunk_of(CHAT, "a"),), False),
        ((chunk_of(CHAT, "a"),), True),
        ((chunk_of(CHAT, "a"), b'data: {"id": "x", "cho'), True),
        ((chunk_of(CHAT, "a"), b'data: {"id": "x", "cho'), False),
    ],
    ids=["no-done", "cut", "cut-in-event", "end-in-event"],
)
@pytest.mark.parametrize("names", ["p0 d0", "o0"])
async def test_a_truncated_stream_ends_in_an_error_event(
    names: str, pieces: tuple[bytes, ...], cut: bool
) -> None:
    """R63, U29: a stream without [DONE], however it ends, never ends silently; half an event
    never leaves, so that the error event can be read."""
    async with cluster(names) as c:
        name, leg = ("o0", "alone") if names == "o0" else ("d0", "decode")
        c[name].on[leg] = streams(*pieces, cut=cut)
        answer = await c.ask(STREAM)
        raw = await answer.read()
        assert answer.status == 200
        assert raw.startswith(pieces[0])
        assert b"[DONE]" not in raw
        error = last_event(raw)["error"]
        assert f'replica "{name}"' in error["message"]
        assert error["code"] in ("truncated", "replica_lost")
        assert raw.count(b"data: ") == 2


async def test_an_error_event_before_any_output_becomes_a_status() -> None:
    """An engine that answers 200 and then an error is a 502 for the client."""
    event = b'data: {"error": {"message": "bad luck", "code": "protocol"}}\n\n'
    async with cluster() as c:
        c["d0"].on["decode"] = streams(event, DONE)
        answer = await c.ask(STREAM)
        assert answer.status == 502
        assert "bad luck" in error_of(await answer.read())["message"]


async def test_an_answer_that_is_not_json_is_no_success() -> None:
    """Garbage with status 200 is a 502, on either leg."""
    async with cluster() as c:
        for name, leg in (("p0", "prefill"), ("d0", "decode")):
            c[name].on[leg] = says(200, b"<html>")
            answer = await c.ask(CHAT)
            assert (answer.status, error_of(await answer.read())["code"]) == (502, "bad_answer")
            del c[name].on[leg]


@pytest.mark.parametrize("leg", ["prefill", "decode", "alone"])
@BODIES
async def test_a_replica_that_leaves_ready_fails_its_legs_at_once(leg: str, body: dict) -> None:
    """R61, U10: the agent says that the replica is gone while its connection still hangs;
    the request fails now, not at its deadline, and names the agent's cause."""
    name = {"prefill": "p0", "decode": "d0", "alone": "o0"}[leg]
    async with cluster("o0" if leg == "alone" else "p0 d0") as c:
        c[name].on[leg] = stalls_then()
        task = asyncio.ensure_future(c.ask(body))
        await c[name].stalled.wait()
        c.keeper.set_state(name, "backoff", "it was killed by signal 9")
        answer = await task
        error = error_of(await answer.read())
        assert answer.status == 502
        assert f'replica "{name}"' in error["message"]
        assert "signal 9" in error["message"]


async def test_a_replica_that_dies_mid_stream_ends_the_stream_with_an_error() -> None:
    """R61: decode dies after its first chunk."""
    async with cluster() as c:
        c["d0"].on["decode"] = streams(chunk_of(CHAT, "a"), hang=True)
        response = await c.post("/v1/chat/completions", STREAM)
        await response.content.readuntil(b"\n\n")
        c.keeper.set_state("d0", "backoff", "it was killed by signal 9")
        error = last_event(await response.read())["error"]
        assert 'decode replica "d0"' in error["message"]
        assert "signal 9" in error["message"]


async def test_a_prefill_that_dies_after_it_succeeded_does_not_touch_the_stream() -> None:
    """Prefill is done and decode streams: prefill's death is none of this request's."""
    async with cluster() as c:

        async def two_halves(engine, request, body):
            response = await opened(request)
            await response.write(chunk_of(body, "a"))
            await stall(engine)
            await response.write(chunk_of(body, "b") + DONE)
            await response.write_eof()
            return response

        c["d0"].on["decode"] = two_halves
        response = await c.post("/v1/chat/completions", STREAM)
        await response.content.readuntil(b"\n\n")
        c.keeper.set_state("p0", "backoff", "gone")
        await eventually(lambda: not c.router.roster.ready())
        c["d0"].release.set()
        assert (await response.read()).endswith(DONE)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_no_request_outlives_its_deadline(leg: str) -> None:
    """R6, R3: a leg that hangs is a 504 that names it; the plan's timeout is the deadline."""
    name = {"prefill": "p0", "decode": "d0"}[leg]
    async with cluster(timeout_s=0.4) as c:
        c[name].on[leg] = stalls_then()
        answer = await c.ask(CHAT)
        error = error_of(await answer.read())
        assert (answer.status, error["code"]) == (504, "deadline")
        assert f'{leg} replica "{name}"' in error["message"]
        await eventually(lambda: len(c[name].aborted) == 1)


async def test_progress_renews_the_deadline() -> None:
    """R1, R5: a stream that takes longer than the deadline, but never pauses that long, lives."""

    async def drips(engine, request, body):
        response = await opened(request)
        for _ in range(25):
            await response.write(chunk_of(body, "a"))
            await asyncio.sleep(0.05)
        await response.write(DONE)
        await response.write_eof()
        return response

    async with cluster(timeout_s=1.0) as c:
        c["d0"].on["decode"] = drips
        answer = await c.ask(STREAM)
        assert (await answer.read()).endswith(DONE)


async def test_a_stale_idle_connection_costs_nobody_a_request() -> None:
    """U21: the engine closed its idle connections; the next request is served, in a new room."""
    async with cluster() as c:
        await c.ask(CHAT)

        async def closes_once(engine, request, body):
            engine.on.pop("decode")
            return await cuts(engine, request, body)

        c["d0"].on["decode"] = closes_once
        answer = await c.ask(CHAT)
        assert answer.status == 200
        rooms = [body["pdctl"]["room"] for _, body in c["d0"].bodies]
        assert len(set(rooms)) == 3
        assert answer.headers["x-pdctl-retried"] == "p0>d0"


async def test_a_request_on_a_dead_replica_is_tried_once_on_another_pair() -> None:
    """R61: p0 is gone before the agent knows; the request goes through p1 and says so."""
    async with cluster("p0 p1 d0") as c:
        await c["p0"].kill()
        for _ in range(2):
            answer = await c.ask(CHAT)
            assert answer.status == 200
            assert answer.headers["x-pdctl-path"] == "p1>d0"
        assert (await c.ask(COMPLETION)).headers["x-pdctl-path"] == "p1>d0"


async def test_an_abort_that_fails_is_tried_again() -> None:
    """R14: the engine answers the first abort with 500; it gets a second one."""
    async with cluster() as c:
        c["d0"].on["decode"] = stalls_then()
        c["d0"].on["abort"] = says(500, b"")
        c["p0"].on["prefill"] = fails(502, "x", "protocol")
        await c.ask(CHAT)
        await eventually(lambda: len(c["d0"].aborted) == 2)
        assert len(set(c["d0"].aborted)) == 1


async def test_an_unreachable_engine_is_not_waited_for() -> None:
    """R23: aborting on a replica that is gone is bounded and the next request works."""
    async with cluster("p0 d0 d1") as c:
        c["p0"].on["prefill"] = stalls_then(answers)
        c["d0"].on["decode"] = stalls_then()
        task = asyncio.ensure_future(c.ask(CHAT, x_pdctl_path="p0>d0"))
        await c["d0"].stalled.wait()
        await c["d0"].kill()
        c["p0"].release.set()
        assert (await task).status in (502, 503)
        assert (await c.ask(CHAT, x_pdctl_path="p0>d1")).status == 200


@BODIES
async def test_a_recomputing_decode_leg_outlives_its_prefill(body: dict) -> None:
    """R72: with on_failure = "recompute" prefill's failure leaves decode open; the answer says
    that decode alone made it, and the failure is counted."""
    async with cluster(on_failure=OnFailure.RECOMPUTE) as c:
        c["p0"].on["prefill"] = fails(502, "lost", "protocol")
        c["d0"].on["decode"] = stalls_then()
        task = asyncio.ensure_future(c.ask(body))
        await c["d0"].stalled.wait()
        await eventually(lambda: c["p0"].served > 0 and c["p0"].open == 0)
        c["d0"].release.set()
        answer = await task
        assert answer.status == 200
        assert answer.headers["x-pdctl-path"] == "d0"
        await c.nothing_open()
        assert 'cause="protocol",leg="prefill"' in c.router.meter.text().decode()
        assert c["d0"].aborted == []


async def test_garbage_after_done_is_not_the_clients() -> None:
    """What follows [DONE] never leaves the router."""
    async with cluster("o0") as c:
        c["o0"].on["alone"] = streams(*events_of(STREAM), b"data: trailing\n\n")
        assert (await (await c.ask(STREAM)).read()) == b"".join(events_of(STREAM))
