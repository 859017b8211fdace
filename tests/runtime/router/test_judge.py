"""What is timed of a request, and what of it is kept."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web
from runtime.router.cluster import CHAT, STREAM, Cluster, cluster, eventually
from runtime.router.engine_time import TIME, computes
from runtime.router.fakes import (
    DONE,
    FakeEngine,
    chunk_of,
    stalls_then,
    streams,
    usage_chunk,
    whole_of,
)

from pdctl.handoff.counters import Counters, Histogram, PairCounters
from pdctl.runtime.cost.record import decode
from pdctl.runtime.router.canary import Ledger
from pdctl.runtime.router.timed import Timed

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _engine_time(monkeypatch: pytest.MonkeyPatch) -> None:
    TIME.counts(monkeypatch)


async def costs(c: Cluster) -> dict[str, dict[str, Any]]:
    """By path."""
    await c.nothing_open()
    status = await (await c.http.get(c.url("/status"))).json()
    return {cost["path"]: cost for cost in status["costs"]}


def usage(cached: int) -> bytes:
    told = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": cached}}
    event = json.loads(usage_chunk(STREAM).removeprefix(b"data: "))
    return b"data: " + json.dumps({**event, "usage": told}).encode() + b"\n\n"


async def tells_nothing(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """As an engine that had all of the prompt already."""
    if body.get("stream"):
        return await streams(chunk_of(body, "a"), usage(9), DONE)(engine, request, body)
    whole = whole_of(body)
    whole["usage"]["prompt_tokens_details"] = {"cached_tokens": 9}
    return web.json_response(whole)


@contextlib.asynccontextmanager
async def unmeasured(names: str, **options: Any) -> AsyncIterator[Cluster]:
    """A cluster in which nothing but canaries was seen, and they told nothing."""
    kinds = ("prefill", "decode", "alone")

    def silent(engines: dict[str, FakeEngine]) -> None:
        for engine in engines.values():
            engine.on.update(dict.fromkeys(kinds, tells_nothing))

    async with cluster(names, set_up=silent, **options) as c:
        assert {cost["samples"] for cost in (await costs(c)).values()} == {0}
        for engine in c.engines.values():
            engine.on.clear()
        yield c


async def test_an_answer_of_a_cached_prompt_is_no_sample() -> None:
    """It tells nothing of a prompt's length."""
    async with unmeasured("o0") as c:
        for cached, samples in ((9, 0), (0, 1)):
            c["o0"].on["alone"] = streams(chunk_of(STREAM, "a"), usage(cached), DONE)
            assert (await c.ask(STREAM)).status == 200
            assert (await costs(c))["o0"]["samples"] == samples


async def test_a_whole_answer_is_a_sample_once_a_step_is_known() -> None:
    """Its time to the first token is what is left without decoding, where that is most of it."""
    async with unmeasured("o0") as c:
        c["o0"].on["alone"] = computes(0.1)
        assert (await c.ask(CHAT)).status == 200
        assert (await costs(c))["o0"]["samples"] == 0
        assert (await c.ask(STREAM)).status == 200
        assert (await costs(c))["o0"]["step_s"] is not None
        assert (await c.ask(CHAT)).status == 200
        assert (await costs(c))["o0"]["samples"] == 2


async def test_requests_that_share_a_replica_are_no_samples() -> None:
    async with unmeasured("o0") as c:
        c["o0"].on["alone"] = stalls_then()
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(c.ask, STREAM)
            await eventually(lambda: c["o0"].open == 8)
            c["o0"].release.set()
        assert (await costs(c))["o0"]["samples"] == 0


async def test_a_request_that_failed_is_no_sample() -> None:
    async with unmeasured("o0") as c:
        c["o0"].on["alone"] = streams(chunk_of(STREAM, "a"), cut=True)
        await c.http.post(c.url("/v1/chat/completions"), json=STREAM)
        assert (await costs(c))["o0"]["samples"] == 0


async def test_phases_are_those_of_the_one_handoff_since_the_last_look(tmp_path: Path) -> None:
    """So is the round trip between the ends."""
    file = tmp_path / "costs.json"
    async with unmeasured("p0 d0", costs_path=str(file)) as c:
        assert (await c.ask(STREAM)).status == 200
        phases = {name: Histogram().observed(0.25) for name in ("prefill", "transfer")}
        c["p0"].counters = Counters(phases=phases)
        c["d0"].counters = Counters(pairs={"p0": PairCounters(round_trip_s=0.002)})
        assert (await costs(c))["p0>d0"]["round_trip_s"] == 0.002
    record = decode(file.read_bytes()).paths["p0>d0"]
    (sample,) = record.samples
    assert (sample.prefill_s, sample.transfer_s) == (0.25, 0.25)
    assert record.round_trip_s == 0.002


async def test_what_is_timed_passes_unchanged() -> None:
    """Events, the room, and when the first output came."""
    ledger, first = Ledger(), []
    timed = Timed(ledger, lambda: first.append(True))
    for raw in (b"data: 1\n\n", b"data: 2\n\n", usage_chunk(STREAM)):
        await timed.event(raw)
    await timed.end()
    assert ledger.body == b"data: 1\n\ndata: 2\n\n" + usage_chunk(STREAM)
    assert first == [True]
    assert timed.events == 3
    assert timed.usage is not None
    assert (timed.usage.prompt_tokens, timed.usage.completion_tokens) == (9, 3)


@pytest.mark.parametrize("raw", [b'{"usage": 7}', b'data: {"usage": [', b'\xff"usage"', b"[]"])
async def test_whatever_an_engine_calls_usage_is_passed_on(raw: bytes) -> None:
    ledger = Ledger()
    timed = Timed(ledger, lambda: None)
    timed.prefilled(raw)
    await timed.event(b"data: " + raw + b"\n\n")
    assert timed.usage is None
    assert ledger.prefilled_body == raw
