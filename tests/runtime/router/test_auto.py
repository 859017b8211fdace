"""`disaggregate = "auto"`: the faster path per request, and no request fails for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest
from aiohttp import web
from runtime.router.cluster import CHAT, STREAM, Cluster, cluster
from runtime.router.engine_time import TIME, computes
from runtime.router.fakes import (
    DONE,
    FakeEngine,
    events_of,
    fails,
    stalls_then,
    streams,
    whole_of,
)
from runtime.router.test_canary_lone import UNRANKED, behave, ranks

from pdctl.runtime.cost.record import decode
from pdctl.runtime.router import calibration
from pdctl.runtime.router.calibration import LENGTHS
from pdctl.topology.model import Disaggregate

pytestmark = pytest.mark.anyio

AUTO = Disaggregate.AUTO
SLOW_S = 0.06
WITHIN = 10
QUEUE = 4


@pytest.fixture(autouse=True)
def _engine_time(monkeypatch: pytest.MonkeyPatch) -> None:
    TIME.counts(monkeypatch)


def alone_is_slow(engines: dict[str, FakeEngine]) -> None:
    engines["d0"].on["alone"] = computes(SLOW_S)


def pair_is_slow(engines: dict[str, FakeEngine]) -> None:
    engines["p0"].on["prefill"] = computes(SLOW_S)


def told(answer: aiohttp.ClientResponse) -> tuple[str, str]:
    """(path, reason)."""
    decision = answer.headers.get("x-pdctl-decision", "")
    return answer.headers["x-pdctl-path"], decision.partition(";")[0]


async def taken(c: Cluster, requests: int) -> list[str]:
    """The paths of so many streamed requests, one after another, all of them answered."""
    found = []
    for _ in range(requests):
        answer = await c.ask(STREAM)
        assert answer.status == 200
        await c.nothing_open()
        found.append(told(answer)[0])
    return found


@pytest.mark.parametrize(("set_up", "path"), [(alone_is_slow, "p0>d0"), (pair_is_slow, "d0")])
async def test_the_faster_path_is_taken_from_the_first_request_on(set_up: Any, path: str) -> None:
    async with cluster("p0 d0", disaggregate=AUTO, set_up=set_up) as c:
        answer = await c.ask(CHAT)
        assert told(answer) == (path, "faster")
        assert {"p0>d0", "d0"} <= {
            word.partition("=")[0] for word in answer.headers["x-pdctl-decision"].split()
        }


async def test_an_ordinary_replica_serves_where_decode_can_not() -> None:
    """DESIGN §7: an SGLang decode replica answers nothing alone."""
    set_up = behave(p0=ranks(), ds0=ranks(first=UNRANKED))
    async with cluster("p0 ds0 o0", disaggregate=AUTO, set_up=set_up) as c:
        c["p0"].on["prefill"] = computes(SLOW_S)
        paths = await taken(c, WITHIN)
        assert set(paths) <= {"p0>ds0", "o0"}
        assert paths[-1] == "o0"
        assert {kind for kind, _ in c["ds0"].bodies} <= {"decode"}


async def test_a_pair_that_becomes_slow_is_left_within_ten_requests() -> None:
    async with cluster("p0 d0", disaggregate=AUTO, set_up=alone_is_slow) as c:
        assert (await taken(c, 4)).count("p0>d0") >= 3
        c["d0"].on["decode"] = computes(4 * SLOW_S)
        found = await taken(c, WITHIN)
        assert found[-3:] == ["d0", "d0", "d0"], c.router.meter.text().decode()


async def test_a_queue_on_the_decode_replica_is_followed_at_once() -> None:
    """Requests that are pinned to it count too."""

    def both_are_slow(engines: dict[str, FakeEngine]) -> None:
        engines["d0"].on["alone"] = computes(SLOW_S)
        engines["p0"].on["prefill"] = computes(2 * SLOW_S)

    async with cluster("p0 d0", disaggregate=AUTO, set_up=both_are_slow) as c:
        assert await taken(c, 2) == ["d0", "d0"]
        c["d0"].on["alone"] = stalls_then()
        async with anyio.create_task_group() as tasks:
            for _ in range(QUEUE):
                tasks.start_soon(pinned, c, "d0")
            while c["d0"].open < QUEUE:  # noqa: ASYNC110
                await anyio.sleep(0.002)
            status = await (await c.http.get(c.url("/status"))).json()
            queued = status["decisions"]["queued_tokens"]
            assert queued["d0"] > 0
            assert queued["p0"] == 0
            assert told(await c.ask(STREAM))[0] == "p0>d0"
            tasks.cancel_scope.cancel()


async def pinned(c: Cluster, path: str) -> None:
    async with c.http.post(
        c.url("/v1/chat/completions"), json=STREAM, headers={"x-pdctl-path": path}
    ) as answer:
        await answer.read()


async def test_a_pair_whose_prefill_replica_dies_under_a_request_is_made_up_for() -> None:
    async with cluster("p0 d0", disaggregate=AUTO, set_up=alone_is_slow) as c:
        await c["p0"].kill()
        answer = await c.ask(CHAT)
        assert (answer.status, told(answer)[0]) == (200, "d0")
        assert answer.headers["x-pdctl-retried"] == "p0>d0"
        again = await c.ask(CHAT)
        assert (again.status, told(again)) == (200, ("d0", "only"))


async def test_a_handoff_that_fails_is_made_up_for() -> None:
    """Decode's own error, before any byte of an answer."""
    async with cluster("p0 d0", disaggregate=AUTO, set_up=alone_is_slow) as c:
        c["d0"].on["decode"] = fails(502, "gone", "peer_lost")
        answer = await c.ask(STREAM)
        assert (answer.status, told(answer)[0]) == (200, "d0")
        assert answer.headers["x-pdctl-retried"] == "p0>d0"


async def test_a_request_that_is_wrong_is_not_tried_twice() -> None:
    async with cluster("p0 d0", disaggregate=AUTO, set_up=alone_is_slow) as c:
        c["d0"].on["decode"] = fails(400, "too long", None)
        assert (await c.ask(CHAT)).status == 400
        assert [kind for kind, _ in c["d0"].bodies] == ["decode"]


async def test_a_pinned_path_is_taken_and_nothing_is_decided() -> None:
    async with cluster("p0 d0", disaggregate=AUTO, set_up=alone_is_slow) as c:
        answer = await c.ask(CHAT, x_pdctl_path="d0")
        assert told(answer) == ("d0", "")


async def counts(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """As an engine that counts a token per four bytes of a completion's prompt."""
    size = len(str(body.get("prompt", ""))) // 4
    usage = {"prompt_tokens": size, "completion_tokens": 3, "total_tokens": size + 3}
    if not body.get("stream"):
        return web.json_response({**whole_of(body), "usage": usage})
    last = {"id": "x", "object": "x", "created": 1, "model": "x", "choices": [], "usage": usage}
    told = b"data: " + json.dumps(last).encode() + b"\n\n"
    return await streams(*events_of(body)[:-2], told, DONE)(engine, request, body)


def counting(engines: dict[str, FakeEngine]) -> None:
    for engine in engines.values():
        engine.on.update(dict.fromkeys(("prefill", "decode", "alone"), counts))


async def measured(c: Cluster) -> dict[str, int]:
    """Samples by path."""
    await c.nothing_open()
    status = await (await c.http.get(c.url("/status"))).json()
    assert not status["decisions"]["decides"]
    return {cost["path"]: cost["samples"] for cost in status["costs"]}


async def test_with_always_paths_are_measured_too_and_every_request_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once per length that the context and, of a pair, its page budget (512 tokens) admit, and
    the canary's own chat; then each request is one sample more."""
    monkeypatch.setattr(
        calibration, "BRIEF", msgspec.structs.replace(calibration.BRIEF, budget_s=60.0)
    )
    admitted = len([n for n in LENGTHS if n < 512])
    async with cluster("p0 d0", set_up=counting) as c:
        assert await measured(c) == {"d0": len(LENGTHS), "p0>d0": admitted + 1}
        answer = await c.ask(STREAM)
        assert told(answer) == ("p0>d0", "")
        assert await measured(c) == {"d0": len(LENGTHS), "p0>d0": admitted + 2}


async def test_with_always_a_slow_engine_is_not_measured_for_long() -> None:
    """Of a pair that needs longer than is to be spent for the canary's chat, that chat is all."""

    def slow(engines: dict[str, FakeEngine]) -> None:
        engines["p0"].on["prefill"] = computes(calibration.BRIEF.budget_s * 1.1)

    async with cluster("p0 d0", set_up=slow) as c:
        assert await measured(c) == {"p0>d0": 1}


async def test_what_was_measured_is_kept_and_not_measured_again(tmp_path: Path) -> None:
    """Its file is its owner's alone."""
    file = tmp_path / "costs.json"
    served = []
    for _ in range(2):
        async with cluster("p0 d0", disaggregate=AUTO, costs_path=str(file), set_up=counting) as c:
            served.append(c["d0"].served)
            assert decode(file.read_bytes()).paths.keys() == {"p0>d0", "d0"}
        assert file.stat().st_mode & 0o777 == 0o600
        kept = decode(file.read_bytes()).paths
        assert kept.keys() == {"p0>d0", "d0"}
        assert len({sample.tokens for sample in kept["d0"].samples}) > 2
    assert served[0] - served[1] > len(kept["d0"].samples)


@pytest.mark.parametrize("raw", [b"", b"{", b'{"format": 99}', b"\xff" * 64])
async def test_a_damaged_file_is_measured_again(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "costs.json"
    file.write_bytes(raw)
    async with cluster("p0 d0", disaggregate=AUTO, costs_path=str(file), set_up=pair_is_slow) as c:
        assert told(await c.ask(CHAT)) == ("d0", "faster")


async def test_a_decision_is_counted_by_path_and_reason() -> None:
    async with cluster("p0 d0", disaggregate=AUTO, set_up=pair_is_slow) as c:
        await taken(c, 3)
        status = await (await c.http.get(c.url("/status"))).json()
        text = await (await c.http.get(c.url("/metrics"))).text()
    decisions = status["decisions"]
    assert decisions["decided"] == decisions["reasons"]["faster"] == len(decisions["latest"]) == 3
    assert 'pdctl_router_decisions_total{path="d0",reason="faster"} 3.0' in text
