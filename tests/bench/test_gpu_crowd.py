"""Clients that leave, and what is looked at when they have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from ports import free_port

from pdctl.runtime.bench.prompts import Prompt
from pdctl.runtime.router.endpoints import COMPLETIONS, STATUS


class Router:
    """Answers " fine" whole and at once, and of a stream nothing until its client leaves."""

    def __init__(self) -> None:
        self.asked = self.left = 0
        self.gauges = {"waiters": 0}
        self.pids = {"vp": 11, "vd": 12}
        self.text = " fine"

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked += 1
        if not body.get("stream"):
            choice = {"text": self.text}
            return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 3}})
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            await asyncio.Event().wait()
        finally:
            self.left += 1
        return response

    async def status(self, request: web.Request) -> web.Response:
        replicas = [
            {"name": name, "pid": pid, "state": "ready", **self.gauges}
            for name, pid in self.pids.items()
        ]
        pair = {"prefill": "vp", "decode": "vd", "state": "ready", "handoffs_failed": 0}
        return web.json_response({"cluster": "c", "replicas": replicas, "pairs": [pair]})


def against(router: Router, work: Callable[[Any, Any], Awaitable[Any]]) -> Any:
    """The result of `work(session, Watched)`; the router runs on loopback meanwhile."""
    from gpu_answers import session
    from gpu_crowd import Watched

    async def whole() -> Any:
        # a client that is gone ends its handler, as the router's own server does
        app = web.Application()
        app.add_routes([web.post(COMPLETIONS, router.completions), web.get(STATUS, router.status)])
        runner, port = web.AppRunner(app, handler_cancellation=True), free_port()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        plan = SimpleNamespace(model="m")
        target: Any = SimpleNamespace(url=f"http://127.0.0.1:{port}", plan=plan, headers={})
        try:
            async with session() as http:
                return await work(http, Watched(http, target))
        finally:
            await runner.cleanup()

    return asyncio.run(whole())


def known() -> Any:
    from gpu_answers import Answer
    from gpu_crowd import Known

    steps = {"tokens": [" fine"], "token_logprobs": [-1.0], "top_logprobs": [{" fine": -1.0}]}
    ranked = {"choices": [{"text": " fine", "logprobs": steps}]}
    own = Answer(" fine", 3, whole=ranked)
    return Known(Prompt(text="three words here", tokens=3), {"vllm": {COMPLETIONS: own}})


def test_those_who_stay_are_compared_and_those_who_leave_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every request is one or the other; a batch came before them."""
    import gpu_crowd

    monkeypatch.setattr(gpu_crowd, "LEAVE_S", 0.02)
    router = Router()

    async def crowd(http: Any, watched: Any) -> Any:
        given = {"requests": 24, "clients": 4}
        return await gpu_crowd.leaving(http, watched, "vp>vd", [known()], "vllm", **given)

    found = against(router, crowd)
    assert len(found["compared"]) + found["left_early"] == 24
    assert found["left_early"] > 0
    assert all(each.holds(0.0) for each in found["compared"])
    assert (found["held"], found["handoffs_failed"], found["same_processes"]) == ({}, 0, True)
    assert router.asked <= 4 + 24


def test_what_is_still_held_when_time_is_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_crowd

    monkeypatch.setattr(gpu_crowd, "IDLE_S", 0.0)
    router = Router()
    router.gauges = {"waiters": 2, "requests_active": 0}

    async def left(http: Any, watched: Any) -> Any:
        return await watched.left()

    assert against(router, left) == {"vp waiters": 2, "vd waiters": 2}


def test_a_process_that_was_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where every answer was right."""
    import gpu_crowd

    monkeypatch.setattr(gpu_crowd, "LEAVING", 0.0)
    router = Router()

    async def crowd(http: Any, watched: Any) -> Any:
        taken = gpu_crowd.compared

        def replaced(*given: Any) -> Any:
            router.pids["vd"] = 13
            return taken(*given)

        monkeypatch.setattr(gpu_crowd, "compared", replaced)
        given = {"requests": 2, "clients": 1}
        return await gpu_crowd.leaving(http, watched, "vp>vd", [known()], "vllm", **given)

    found = against(router, crowd)
    assert not found["same_processes"]
    assert all(each.holds(0.0) for each in found["compared"])
