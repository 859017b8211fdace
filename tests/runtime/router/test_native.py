"""The engines' own handoffs through the router: vLLM's prefills first, SGLang's legs meet."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from runtime.router.cluster import CHAT, COMPLETION, STREAM, cluster, error_of, eventually
from runtime.router.fakes import (
    FakeEngine,
    answers,
    events_of,
    fails,
    stalls_then,
    whole_of,
)

from pdctl.handoff.counters import OF_A_HANDOFF, OF_PAGES, Counters, PairCounters
from pdctl.runtime.router.members import Verdict
from pdctl.topology.model import Transport

pytestmark = pytest.mark.anyio

NAMES = "pv0 dv0"
WHERE = {"do_remote_prefill": True, "remote_block_ids": [[3]], "remote_engine_id": "e"}


async def prefills(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """As vLLM's own connector answers."""
    return web.json_response({**whole_of(body), "kv_transfer_params": WHERE})


def native(names: str = NAMES, **options: Any) -> Any:
    def set_up(engines: dict[str, FakeEngine]) -> None:
        for engine in engines.values():
            engine.on["prefill"] = prefills

    return cluster(names, transport=Transport.NATIVE, canaries=False, set_up=set_up, **options)


def pinned(names: str = NAMES) -> dict[str, str]:
    return {"x_pdctl_path": names.replace(" ", ">")}


async def begin(c: Any, names: str = NAMES) -> None:
    """The canary needs rankings that these engines do not give: its verdict is set aside."""
    await eventually(lambda: c.router.roster.heard)
    path = c.router.roster.paths[0]
    await eventually(lambda: c.router.roster.verdict(path) is not None)
    held = c.router.roster.incarnations(path)
    c.router.roster.end_canary(path, Verdict(incarnations=held, cause=None))
    c.forget()
    await c.nothing_open()


@pytest.mark.parametrize("body", [CHAT, COMPLETION, STREAM])
async def test_decode_begins_with_what_prefill_answered(body: dict[str, Any]) -> None:
    """S5: one after the other; the client reads decode's answer, byte for byte."""
    async with native() as c:
        await begin(c)
        c["pv0"].on["prefill"] = stalls_then(prefills)
        task = asyncio.ensure_future(c.ask(body, **pinned()))
        await c["pv0"].stalled.wait()
        assert c["dv0"].bodies == []
        c["pv0"].release.set()
        answer = await task
        raw = await answer.read()
        assert answer.headers["x-pdctl-path"] == "pv0>dv0"
        if body is STREAM:
            assert raw == b"".join(events_of(body))
        else:
            assert json.loads(raw) == whole_of(body)
        (_, prefill), (_, decode) = c["pv0"].bodies[0], c["dv0"].bodies[0]
        leg = prefill["kv_transfer_params"].pop("pdctl")
        assert leg["native"]
        assert str(leg["room"]) == answer.headers["x-pdctl-room"]
        assert prefill["kv_transfer_params"]["do_remote_decode"] is True
        assert prefill["max_tokens"] == 1
        assert decode.pop("kv_transfer_params") == {**WHERE, "pdctl": leg}
        assert decode == body


async def test_an_answer_that_names_no_blocks_fails_the_request() -> None:
    """R72: decode, which would compute the prompt itself, is never asked."""
    async with native() as c:
        await begin(c)
        c["pv0"].on["prefill"] = answers
        answer = await c.ask(CHAT, **pinned())
        assert answer.status == 502
        error = error_of(await answer.read())
        assert error["code"] == "protocol"
        assert 'decode replica "dv0"' in error["message"]
        assert c["dv0"].bodies == []


async def test_prefill_s_failure_never_reaches_decode() -> None:
    """R21: there is nothing to end there."""
    async with native() as c:
        await begin(c)
        c["pv0"].on["prefill"] = fails(500, "out of memory", None)
        answer = await c.ask(STREAM, **pinned())
        assert answer.status == 502
        assert 'prefill replica "pv0"' in error_of(await answer.read())["message"]
        assert c["dv0"].bodies == []


async def test_prefill_gets_no_order_about_what_vllm_lets_go_itself() -> None:
    """U2: decode, which refuses, tells prefill; where it never heard, a lease ends."""
    async with native() as c:
        await begin(c)
        c["dv0"].on["decode"] = fails(400, "too many logprobs", None)
        answer = await c.ask(STREAM, **pinned())
        assert answer.status == 400
        await c.nothing_open()
        assert [kind for kind, _ in c["pv0"].bodies] == ["prefill"]


@pytest.mark.parametrize("stage", ["pv0", "dv0"])
async def test_a_client_that_leaves_ends_both_ends_at_either_stage(stage: str) -> None:
    """U5, U34: during prefill its connection is closed and decode hears nothing."""
    async with native() as c:
        await begin(c)
        c["pv0" if stage == "pv0" else "dv0"].on["prefill" if stage == "pv0" else "decode"] = (
            stalls_then(prefills)
        )
        task = asyncio.ensure_future(c.ask(STREAM, **pinned()))
        await c[stage].stalled.wait()
        task.cancel()
        await eventually(lambda: c["pv0"].open == c["dv0"].open == 0)
        await c.nothing_open()
        assert (c["dv0"].bodies == []) == (stage == "pv0")


async def test_sglang_s_legs_start_together() -> None:
    """S8: they meet at the prefill replica's bootstrap server."""
    names = "ps0 ds0"
    async with native(names) as c:
        await begin(c, names)
        c["ps0"].on["prefill"] = stalls_then(answers)
        task = asyncio.ensure_future(c.ask(CHAT, **pinned(names)))
        await c["ps0"].stalled.wait()
        await eventually(lambda: len(c["ds0"].bodies) == 1)
        c["ps0"].release.set()
        assert (await task).status == 200
        _, body = c["ds0"].bodies[0]
        assert (body["bootstrap_host"], body["bootstrap_port"]) == ("127.0.0.1", 9)


async def test_what_an_end_cannot_tell_is_null_and_no_sample() -> None:
    """Its zeros would be taken for the truth; the pair shows what the other end counts."""
    async with native() as c:
        pair = PairCounters(handoffs_completed=3, imported_tokens=9)
        c["pv0"].counters = Counters(untold=OF_A_HANDOFF, prompt_tokens=5)
        c["dv0"].counters = Counters(
            untold=OF_PAGES, handoffs_completed=3, pairs={"pv0": pair, "dv0": pair}
        )
        status = await (await c.http.get(c.url("/status"))).json()
        prefill, decode = status["replicas"]
        assert (prefill["handoffs_completed"], prefill["prompt_tokens"]) == (None, 5)
        assert (decode["handoffs_completed"], decode["waiters"]) == (3, None)
        shown = status["pairs"][0]
        assert shown["transport"] == "native"
        assert (shown["handoffs_completed"], shown["imported_tokens"]) == (3, 9)
        assert shown["reused_pages"] is None
        text = await (await c.http.get(c.url("/metrics"))).text()
        assert 'pdctl_handoffs_completed{replica="dv0",role="decode"} 3.0' in text
        assert 'pdctl_handoffs_completed{replica="pv0"' not in text
        assert "pdctl_pair_reused_pages{" not in text
