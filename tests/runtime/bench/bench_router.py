"""A router in a test: `/status` with counters, and streams that misbehave on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from pdctl.topology.model import (
    ComputeDtype,
    Dtype,
    Engine,
    Host,
    Model,
    Replica,
    Role,
    Topology,
    Transport,
)
from pdctl.topology.plan import PairPlan, Plan, ReplicaPlan

PAGE_BYTES = 4096
CONTEXT = 1024


def replica_plan(name: str, role: Role, engine: Engine = Engine.MLX) -> ReplicaPlan:
    return ReplicaPlan(
        name=name,
        host="local",
        engine=engine,
        role=role,
        model="/models/tiny",
        dtype=Dtype.FLOAT16,
        compute_dtype=ComputeDtype.FLOAT32,
        http_port=1,
        declared=Replica(name=name, engine=engine, role=role, model="/models/tiny"),
    )


def plan(
    *replicas: ReplicaPlan, pairs: Sequence[tuple[str, str]] = (("p0", "d0"),), bind: str = ""
) -> Plan:
    chosen = replicas or (replica_plan("p0", Role.PREFILL), replica_plan("d0", Role.DECODE))
    return Plan(
        cluster="studio",
        model="tiny",
        dtype=Dtype.FLOAT16,
        context_length=CONTEXT,
        contract_digest="0" * 64,
        token_kv_bytes=PAGE_BYTES // 64,
        page_bytes=PAGE_BYTES,
        buffer_bytes=1 << 29,
        timeout_s=60.0,
        router_host="local",
        router_bind=bind or "127.0.0.1:8000",
        agent_ports={},
        replicas=chosen,
        pairs=tuple(
            PairPlan(prefill=p, decode=d, transport=Transport.TCP, reason="host pages")
            for p, d in pairs
        ),
    )


def topology(planned: Plan | None = None, ssh: str | None = None) -> Topology:
    """What `planned` was derived from."""
    return Topology(
        name="studio",
        model=Model(name="tiny", context_length=CONTEXT),
        hosts={"local": Host(name="local", ssh=ssh)},
        replicas=tuple(replica.declared for replica in (planned or plan()).replicas),
    )


class FakeRouter:
    """Answers as the router of `plan()` would; the fields below bend it.

    `tokens_of` counts a prompt's tokens. `words` is every answer's text, a chunk each.
    """

    def __init__(self, tokens_of: Callable[[str], int]) -> None:
        self.tokens_of = tokens_of
        self.words = ["one", " two", " three"]
        self.words_of: dict[str, list[str]] = {}
        """By path, where it differs."""
        self.empty_first = False
        self.before_text: Callable[[], None] | None = None
        self.end_early = False
        self.stall_at: int | None = None
        """The number, from 1, of the request whose answer never comes."""
        self.stalled: Callable[[], None] | None = None
        """Called when it stalls."""
        self.refuse: dict[str, tuple[int, dict[str, Any]]] = {}
        self.error_in_stream = ""
        self.extra_tokens = 0
        self.pair_state = "ready"
        self.status_fails_at: int | None = None
        self.status_asked = 0
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.active = 0
        self.most_active = 0
        self.gone = 0
        self.counters = {"imported_tokens": 0, "host_bytes": 0, "handoffs_completed": 0}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/status", self._status)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    async def _status(self, request: web.Request) -> web.Response:
        self.status_asked += 1
        if self.status_asked == self.status_fails_at:
            return web.json_response({"error": {"message": "stopping"}}, status=503)
        phases = {"prefill": {"counts": [self.counters["handoffs_completed"]], "sum_s": 0.0}}
        idle = {"imported_tokens": 0, "host_bytes": 0, "handoffs_completed": 0}
        return web.json_response(
            {
                "cluster": "studio",
                "replicas": [
                    {"name": "p0", "engine": "mlx", "state": "ready", "phases": phases, **idle},
                    {"name": "d0", "engine": "mlx", "state": "ready", "engine_version": "1"} | idle,
                ],
                "pairs": [
                    {"prefill": "p0", "decode": "d0", "state": self.pair_state, "cause": None}
                    | self.counters
                ],
            }
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        path = request.headers["x-pdctl-path"]
        body = await request.json()
        self.asked.append((path, body))
        if path in self.refuse:
            status, answer = self.refuse[path]
            return web.json_response(answer, status=status)
        self.active += 1
        self.most_active = max(self.active, self.most_active)
        try:
            return await self._stream(request, path, body)
        except asyncio.CancelledError:
            self.gone += 1
            raise
        finally:
            self.active -= 1

    async def _stream(
        self, request: web.Request, path: str, body: dict[str, Any]
    ) -> web.StreamResponse:
        tokens = self.tokens_of(body["prompt"])
        if ">" in path:
            imported = tokens - 1
            self.counters["imported_tokens"] += imported + self.extra_tokens
            self.counters["host_bytes"] += -(-imported // 64) * PAGE_BYTES
            self.counters["handoffs_completed"] += 1
        response = web.StreamResponse(headers={"x-pdctl-path": path})
        response.content_type = "text/event-stream"
        await response.prepare(request)
        if self.empty_first:
            await _event(response, _chunk(""))
            await response.write(b": ping\n\n")
        if self.stall_at == len(self.asked):
            if self.stalled is not None:
                self.stalled()
            await asyncio.Event().wait()
        if self.before_text is not None:
            self.before_text()
        if self.error_in_stream:
            await _event(response, {"error": {"message": self.error_in_stream}})
            return response
        words = self.words_of.get(path, self.words)
        for word in words:
            await _event(response, _chunk(word))
        if self.end_early:
            return response
        await _event(response, _chunk("", finish_reason="length"))
        usage = {"prompt_tokens": tokens, "completion_tokens": len(words)}
        await _event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


def _chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


async def _event(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
