"""Routes, access, and OpenAI's error object for whatever goes wrong."""

from __future__ import annotations

import asyncio
import io
import json

import aiohttp
import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families
from runtime.router.cluster import CHAT, COMPLETION, MODEL, STREAM, cluster, eventually
from runtime.router.fakes import chunk_of, events_of, fails, stalls_then, streams

from pdctl.handoff.counters import BUCKETS_S, COUNTED, Counters, Histogram, PairCounters
from pdctl.runtime.router.metrics import GAUGES, SCALARS
from pdctl.runtime.router.request import MAX_BODY_BYTES

pytestmark = pytest.mark.anyio


async def error(response) -> dict:
    found = json.loads(await response.read())["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


async def test_wrong_paths_and_methods_are_error_objects() -> None:
    async with cluster("o0") as c:
        assert (await error(await c.http.get(c.url("/nope"))))["code"] == "not_found"
        response = await c.http.get(c.url("/v1/completions"))
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await error(response))["code"] == "method_not_allowed"


async def test_bad_bodies_are_error_objects() -> None:
    """Bad JSON, invalid UTF-8: 400; too large: 413; compressed: 415; no engine is asked."""
    async with cluster("o0") as c:
        url = c.url("/v1/chat/completions")
        for raw in (b"", b"{", b"\xff", b"[]"):
            response = await c.http.post(url, data=raw)
            assert (response.status, (await error(response))["code"]) == (400, "invalid_json")
        response = await c.http.post(url, data=b"{}", headers={"content-encoding": "gzip"})
        assert (response.status, (await error(response))["code"]) == (415, "unsupported_encoding")
        large = io.BytesIO(b" " * (MAX_BODY_BYTES + 1))
        response = await c.http.post(url, data=large)
        assert (response.status, (await error(response))["code"]) == (413, "body_too_large")
        assert c["o0"].bodies == []


async def test_an_api_key_is_needed_everywhere_but_for_health() -> None:
    """R60: with a key set, /health, /ready and the page, which asks for the key, alone are open."""
    async with cluster("o0", api_key="s3cret") as c:
        for path in ("/health", "/ready", "/"):
            assert (await c.http.get(c.url(path))).status == 200
        wrong = [{}, {"Authorization": "Bearer no"}, {"Authorization": "s3cret"}]
        wrong += [{"Authorization": "Basic s3cret"}, {"Authorization": "Bearer s3cretß"}]
        for path in ("/v1/models", "/status", "/metrics", "/nope"):
            for headers in wrong:
                response = await c.http.get(c.url(path), headers=headers)
                assert response.status == 401
                assert (await error(response))["code"] == "invalid_api_key"
        assert (await c.ask(CHAT)).status == 401
        assert (await c.ask(CHAT, Authorization="Bearer s3cret")).status == 200


async def test_models_are_the_topologys_and_503_when_nothing_serves() -> None:
    """U27: with every path dead /v1/models is a 503 that says why of each path."""
    async with cluster("p0 d0 o0") as c:
        listed = await (await c.http.get(c.url("/v1/models"))).json()
        assert [entry["id"] for entry in listed["data"]] == [MODEL]
        assert (await c.http.get(c.url(f"/v1/models/{MODEL}"))).status == 200
        assert (await c.http.get(c.url("/v1/models/other"))).status == 404
        c.keeper.set_state("p0", "backoff", "p0 was killed")
        await eventually(lambda: len(c.router.roster.ready()) == 1)
        assert (await c.http.get(c.url("/v1/models"))).status == 200
        c.keeper.set_state("o0", "backoff", "o0 was killed")
        await eventually(lambda: not c.router.roster.ready())
        response = await c.http.get(c.url("/v1/models"))
        assert response.status == 503
        told = (await error(response))["message"]
        assert 'p0>d0: prefill replica "p0": p0 was killed' in told
        assert 'o0: replica "o0": o0 was killed' in told
        assert (await c.ask(CHAT)).status == 503
        assert (await c.http.get(c.url("/ready"))).status == 503
        assert (await c.http.get(c.url("/health"))).status == 200


async def test_a_router_that_is_stopped_tells_its_clients() -> None:
    """R17: after a moment's grace each request ends with an error that says so, and what the
    engines do for it is aborted."""
    async with cluster() as c:
        c["d0"].on["decode"] = stalls_then()
        async with anyio.create_task_group() as tasks:
            answers = []

            async def ask() -> None:
                answers.append(await c.ask(CHAT))

            tasks.start_soon(ask)
            await c["d0"].stalled.wait()
            c.stop()
        assert answers[0].status == 503
        assert (await error(answers[0]))["code"] == "router_stopped"
        await eventually(lambda: len(c["d0"].aborted) == 1)


async def test_ready_says_what_is_missing() -> None:
    """One path is enough for 200; the others are named with their cause."""
    async with cluster("p0 d0 d1") as c:
        assert (await (await c.http.get(c.url("/ready"))).json())["status"] == "ready"
        c.keeper.set_state("d1", "starting")
        await eventually(lambda: len(c.router.roster.ready()) == 1)
        response = await c.http.get(c.url("/ready"))
        said = await response.json()
        assert response.status == 200
        assert said == {
            "status": "degraded",
            "ready": ["p0>d0"],
            "missing": {"p0>d1": 'decode replica "d1": it is starting'},
        }


async def test_a_pin_goes_where_it_says_or_is_refused_by_name() -> None:
    async with cluster("p0 d0 d1 o0") as c:
        for path in ("p0>d1", "o0", "p0>d0", "d0"):
            answer = await c.ask(COMPLETION, x_pdctl_path=path)
            assert (answer.status, answer.headers["x-pdctl-path"]) == (200, path)
            transport = "tcp" if ">" in path else None
            assert answer.headers.get("x-pdctl-transport") == transport
        answer = await c.ask(COMPLETION, x_pdctl_path="d9")
        assert answer.status == 400
        assert "p0>d0, p0>d1, o0" in (await error(answer))["message"]
        c.keeper.set_state("d1", "draining")
        await eventually(lambda: len(c.router.roster.ready()) == 2)
        answer = await c.ask(COMPLETION, x_pdctl_path="p0>d1")
        assert answer.status == 503
        assert "p0>d1" in (await error(answer))["message"]


async def test_what_the_engines_refuse_names_parameter_and_pair() -> None:
    """R66, R65."""
    async with cluster("p0 d0") as c:
        answer = await c.ask({**CHAT, "response_format": {"type": "json_object"}})
        told = await error(answer)
        assert (answer.status, told["param"]) == (400, "response_format")
        assert "p0>d0" in told["message"]
        assert (await c.ask({**CHAT, "response_format": {"type": "text"}})).status == 200


async def test_a_dead_prefill_closes_its_pairs_and_an_ordinary_replica_serves() -> None:
    """U19, R71: decode gets nothing while its prefill is down."""
    async with cluster("p0 d0 o0") as c:
        assert (await c.ask(CHAT)).headers["x-pdctl-path"] == "p0>d0"
        c.keeper.set_state("p0", "backoff", "gone")
        await eventually(lambda: len(c.router.roster.ready()) == 1)
        seen = len(c["d0"].bodies)
        answer = await c.ask(CHAT)
        assert (answer.status, answer.headers["x-pdctl-path"]) == (200, "o0")
        assert len(c["d0"].bodies) == seen


async def test_draining_takes_no_new_request_and_lets_the_running_one_end() -> None:
    async with cluster("p0 d0") as c:
        c["d0"].on["decode"] = stalls_then()
        task = asyncio.ensure_future(c.ask(CHAT))
        await c["d0"].stalled.wait()
        c.keeper.set_state("d0", "draining")
        await eventually(lambda: not c.router.roster.ready())
        assert (await c.ask(CHAT)).status == 503
        c["d0"].release.set()
        assert (await task).status == 200


async def test_status_has_fresh_counters() -> None:
    """Counters come through Refresh, per replica and per pair; a silent agent means the last
    picture, said so."""
    async with cluster("p0 d0 o0") as c:
        phases = {"import": Histogram().observed(0.02)}
        pair = PairCounters(handoffs_completed=3, imported_tokens=150, phases=phases)
        c["d0"].counters = Counters(handoffs_completed=3, pairs={"p0": pair})
        before = c.keeper.refreshes
        status = await (await c.http.get(c.url("/status"))).json()
        assert (status["cluster"], status["fresh"]) == ("test", True)
        replicas = {replica["name"]: replica for replica in status["replicas"]}
        assert set(replicas) == {"p0", "d0", "o0"}
        assert replicas["d0"]["handoffs_completed"] == 3
        assert replicas["o0"]["canary"] == "ready"
        (found,) = status["pairs"]
        assert (found["prefill"], found["decode"], found["state"]) == ("p0", "d0", "ready")
        assert found["imported_tokens"] == 150
        assert found["phases"]["import"]["sum_s"] == 0.02
        assert found["round_trip_s"] is None
        assert c.keeper.refreshes == before + 1


async def test_a_client_that_closes_after_done_was_served() -> None:
    """Load generators do; it has all of the answer, and is counted so, however long the engine
    takes to end its own."""
    async with cluster("p0 d0") as c:
        c["d0"].on["decode"] = streams(*events_of(STREAM), hang=True)
        for _ in range(3):
            async with aiohttp.ClientSession() as session:
                asked = session.post(c.url("/v1/chat/completions"), json=STREAM)
                async with asked as answer:
                    while b"[DONE]" not in await answer.content.readline():
                        pass
                    answer.close()
        await c.nothing_open()
        text = await (await c.http.get(c.url("/metrics"))).text()
        assert 'pdctl_router_requests_total{path="p0>d0",status="200"} 3.0' in text
        assert 'pdctl_router_e2e_seconds_count{path="p0>d0"} 3.0' in text


async def test_status_tells_of_router_requests_and_failures() -> None:
    """What the status page shows beside counters: the router's own, what is in flight with its
    room and its last progress, and what failed with its cause; rooms are strings."""
    async with cluster("p0 d0") as c:
        assert (await c.ask(CHAT)).status == 200
        c["d0"].on["decode"] = fails(502, "p0 closed the connection", "peer_lost")
        failed = await c.ask(CHAT)
        c["d0"].on["decode"] = stalls_then()
        waiting = asyncio.ensure_future(c.ask(CHAT))
        await c["d0"].stalled.wait()
        room = c["d0"].bodies[-1][1]["pdctl"]["room"]
        c["d0"].counters = Counters(rooms={room: 0.25})
        await eventually(lambda: c.router.meter.active == 1)
        status = await (await c.http.get(c.url("/status"))).json()
        router, (handoff,), (failure,) = (status[k] for k in ("router", "handoffs", "failures"))
        assert (status["state"], status["phase_buckets_s"]) == ("ready", list(BUCKETS_S))
        counts = [router[f"requests_{k}"] for k in ("active", "total", "failed")]
        assert (counts, router["draining"]) == ([1, 3, 1], False)
        assert router["uptime_s"] > handoff["age_s"] > 0
        assert (handoff["room"], handoff["path"]) == (str(room), "p0>d0")
        assert (handoff["stage"], handoff["idle_s"]) == ("handoff", 0.25)
        assert failure["room"] == failed.headers["x-pdctl-room"]
        told = [failure[k] for k in ("path", "leg", "replica", "status", "cause", "count")]
        assert told == ["p0>d0", "decode", "d0", 502, "peer_lost", 1]
        c["d0"].release.set()
        assert (await waiting).status == 200
        await c.nothing_open()
        status = await (await c.http.get(c.url("/status"))).json()
        assert status["handoffs"] == []


async def test_a_clients_own_mistake_is_refused_and_has_not_failed() -> None:
    """The status page says of each how many there were; only failures are listed below."""
    async with cluster("p0 d0") as c:
        assert (await c.ask({**CHAT, "n": 2})).status == 400
        c["d0"].on["decode"] = fails(502, "p0 closed the connection", "peer_lost")
        assert (await c.ask(CHAT)).status == 502
        status = await (await c.http.get(c.url("/status"))).json()
    counts = [status["router"][f"requests_{k}"] for k in ("total", "refused", "failed")]
    assert (counts, len(status["failures"])) == ([2, 1, 1], 1)


async def test_metrics_have_the_designs_names() -> None:
    """DESIGN §6: the counters' names with prefix pdctl_, and the router's own."""
    async with cluster("p0 d0") as c:
        await c.ask(CHAT)
        c["d0"].on["decode"] = streams(chunk_of(CHAT, "a"))
        await c.ask({**CHAT, "stream": True})
        await c.nothing_open()
        text = await (await c.http.get(c.url("/metrics"))).text()
        for name in (
            "handoffs_active handoffs_completed handoffs_failed handoffs_cancelled imported_tokens "
            "host_bytes gpu_bytes reused_pages buffer_bytes_used waiters"
        ).split():
            assert f'pdctl_{name}{{replica="d0",role="decode"}} 0' in text
        assert 'pdctl_pair_imported_tokens{decode="d0",prefill="p0"} 0' in text
        assert 'pdctl_router_requests_total{path="p0>d0",status="200"} 1' in text
        assert 'pdctl_router_requests_total{path="p0>d0",status="cut"} 1' in text
        assert 'cause="truncated",leg="decode",replica="d0"} 1' in text
        assert 'pdctl_router_ttft_seconds_count{path="p0>d0"} 1' in text
        assert 'pdctl_path_ready{path="p0>d0"} 1' in text


async def test_every_metric_has_its_type() -> None:
    """As Prometheus reads them: what only grows is a counter, under the name of its samples."""
    async with cluster("p0 d0") as c:
        c["p0"].counters = Counters(failures={"expired": 1})
        await c.ask(CHAT)
        text = await (await c.http.get(c.url("/metrics"))).text()
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert {f.name for f in families.values() if f.type == "unknown"} == set()
    gauges = {name for name, f in families.items() if f.type == "gauge"}
    assert {f"pdctl_{name}" for name in GAUGES} - {"pdctl_round_trip_s"} <= gauges
    counted = {name for name, f in families.items() if f.type == "counter"}
    assert counted >= {
        *(f"pdctl_{name}" for name in set(SCALARS) - GAUGES),
        *(f"pdctl_pair_{name}" for name in set(COUNTED) - GAUGES),
        "pdctl_handoffs_failed_by_cause",
        "pdctl_router_requests",
    }


async def test_no_answer_names_the_libraries_behind_it() -> None:
    async with cluster("o0") as c:
        for path in ("/health", "/nope"):
            assert (await c.http.get(c.url(path))).headers["Server"] == "pdctl"
