"""Engines that misbehave on demand, and the agent's end of the socket, for router tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
from aiohttp import web

from pdctl.engines.channel import (
    Attach,
    Failed,
    Members,
    MemberState,
    Message,
    PairStates,
    Refresh,
    RouterAssignment,
    RouterReport,
    ToAgent,
    encode,
)
from pdctl.handoff.counters import Counters
from pdctl.topology.model import Engine, Role

Answer = Callable[["FakeEngine", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

TEXT = ("Hel", "lo ", "there")
STEPS = [
    {"id": 7, "logprob": -0.1, "top_logprobs": [{"id": i, "logprob": -0.1 - i} for i in range(5)]}
    for _ in range(4)
]


def engine_of(name: str) -> Engine:
    """ "ps0" and "ds0" are SGLang's, "pv0" and "dv0" vLLM's; all others are MLX's."""
    return {"s": Engine.SGLANG, "v": Engine.VLLM}.get(name[1:2], Engine.MLX)


def legs_of(body: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
    """Where each engine's adapter puts its leg."""
    yield body.get("pdctl")
    for name in ("custom_params", "kv_transfer_params"):
        yield body.get(name, {}).get("pdctl")


class FakeEngine:
    """One HTTP server that answers like an MLX replica, unless told otherwise.

    `on` maps "prefill", "decode", "alone", "abort" and "health" to what happens there.
    """

    def __init__(self, name: str, role: Role) -> None:
        self.name = name
        self.role = role
        self.on: dict[str, Answer] = {}
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.aborted: list[int] = []
        self.open = 0
        self.served = 0
        self.stalled = asyncio.Event()
        self.release = asyncio.Event()
        self.incarnation = 1
        self.port = 0
        self.counters = Counters()
        self._runner: web.AppRunner | None = None
        self._server: web.Server[Any] | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/pdctl/abort", self._abort)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """Like SIGKILL: every connection is reset, nothing listens any more."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        self.cut_connections(runner)
        await runner.cleanup()

    def cut_connections(self, runner: web.AppRunner | None = None) -> None:
        runner = runner or self._runner
        assert runner is not None
        assert runner.server is not None
        for protocol in list(runner.server.connections):
            if protocol.transport is not None:
                protocol.transport.abort()

    @property
    def connections(self) -> int:
        if self._runner is None or self._runner.server is None:
            return 0
        return len(self._runner.server.connections)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        leg = next((leg for leg in legs_of(body) if leg is not None and "room" in leg), None)
        kind = "alone"
        if leg is not None:
            kind = "prefill" if leg["prefill"] == self.name else "decode"
        self.bodies.append((kind, body))
        self.open += 1
        try:
            return await self.on.get(kind, answers)(self, request, body)
        finally:
            self.open -= 1
            self.served += 1

    async def _abort(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.aborted.append(body["room"])
        if "abort" in self.on:
            return await self.on["abort"](self, request, body)
        return web.json_response({"aborted": True})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if "health" in self.on:
            return await self.on["health"](self, request, {})
        return web.json_response({"status": "ok"})

    def member(self, state: str = "ready", cause: str | None = None) -> MemberState:
        return MemberState(
            name=self.name,
            engine=engine_of(self.name),
            role=self.role,
            host="local",
            state=state,
            cause=cause,
            pid=1,
            started_at=1.0,
            http_port=self.port,
            data_port=9,
            incarnation=self.incarnation,
            counters=self.counters,
        )


# -- what engines do


def chunk_of(body: dict[str, Any], text: str | None, finish: str | None = None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    if "messages" in body:
        choice["delta"] = {"role": "assistant"} | ({"content": text} if text else {})
        kind = "chat.completion.chunk"
    else:
        choice["text"] = text or ""
        kind = "text_completion"
    event = {"id": "x", "object": kind, "created": 1, "model": body["model"], "choices": [choice]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive 1/2\n\n"


def usage_chunk(body: dict[str, Any]) -> bytes:
    event = {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": body["model"],
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
    }
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def events_of(body: dict[str, Any]) -> list[bytes]:
    events = [chunk_of(body, text) for text in TEXT] + [chunk_of(body, None, "length")]
    if body.get("stream_options", {}).get("include_usage"):
        events.append(usage_chunk(body))
    return [*events, DONE]


def whole_of(body: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    if "messages" in body:
        choice["message"] = {"role": "assistant", "content": "".join(TEXT)}
    else:
        choice["text"] = "".join(TEXT)
    if body.get("logprobs"):
        choice["logprobs"] = {"content": STEPS}
    kind = "chat.completion" if "messages" in body else "text_completion"
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    return {
        "id": "x",
        "object": kind,
        "created": 1,
        "model": body["model"],
        "choices": [choice],
        "usage": usage,
    }


async def answers(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    if not body.get("stream"):
        return web.json_response(whole_of(body))
    return await streams(*events_of(body))(engine, request, body)


async def opened(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    return response


async def stall(engine: FakeEngine) -> None:
    """Until released; says first that it got here."""
    engine.stalled.set()
    await engine.release.wait()


def streams(*pieces: bytes, cut: bool = False, hang: bool = False) -> Answer:
    """Sends these bytes, then ends properly, cuts the connection, or stalls."""

    async def answer(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = await opened(request)
        for piece in pieces:
            await response.write(piece)
        if hang:
            await stall(engine)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write_eof()
        return response

    return answer


def stalls_then(then: Answer = answers) -> Answer:
    """Stalls before its status, then goes on."""

    async def answer(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        await stall(engine)
        return await then(engine, request, body)

    return answer


def says(status: int, body: bytes, content_type: str = "application/json") -> Answer:
    async def answer(
        engine: FakeEngine, request: web.Request, asked: dict[str, Any]
    ) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={"content-type": content_type})

    return answer


def fails(status: int, message: str, code: str | None) -> Answer:
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    return says(status, json.dumps({"error": error}).encode())


async def cuts(
    engine: FakeEngine, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """The connection breaks before any status."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def half_a_body(hang: bool) -> Answer:
    """200, half of a JSON body, then a stall or a cut."""

    async def answer(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.content_length = 1000
        await response.prepare(request)
        await response.write(b'{"id": "x", ')
        if hang:
            await stall(engine)
        assert request.transport is not None
        request.transport.abort()
        return response

    return answer


# -- the agent's end


class StubKeeper:
    """Speaks channel.py to one router at a time."""

    def __init__(self, path: str, assignment: RouterAssignment) -> None:
        self.path = path
        self.assignment = assignment
        self.engines: dict[str, FakeEngine] = {}
        self.states: dict[str, tuple[str, str | None]] = {}
        self.failures: tuple[Failed, ...] = ()
        self.heard: list[Message] = []
        self.refreshes = 0
        self.answers_refresh = True
        self.attached = 0
        self._version = 0
        self._server: asyncio.AbstractServer | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._decoder = msgspec.msgpack.Decoder(ToAgent)
        self.changed = asyncio.Event()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def stop(self) -> None:
        """The agent dies: the socket closes."""
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(4), "little")
                message = self._decoder.decode(await reader.readexactly(length))
                self._take(message, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _take(self, message: Any, writer: asyncio.StreamWriter) -> None:
        self.heard.append(message)
        self.changed.set()
        if isinstance(message, Attach):
            self.attached += 1
            writer.write(encode(self.assignment))
            writer.write(encode(self._members()))
        elif isinstance(message, Refresh):
            self.refreshes += 1
            if self.answers_refresh:
                writer.write(encode(self._members(seq=message.seq)))

    def push(self, message: Message | None = None) -> None:
        """Members as they are now, or any other message."""
        for writer in self._writers:
            writer.write(encode(message or self._members()))

    def set_state(self, name: str, state: str, cause: str | None = None) -> None:
        self.states[name] = (state, cause)
        self.push()

    def _members(self, seq: int = 0) -> Members:
        self._version += 1
        return Members(
            version=self._version,
            seq=seq,
            members=tuple(
                engine.member(*self.states.get(name, ("ready", None)))
                for name, engine in self.engines.items()
            ),
            failures=self.failures,
        )

    @property
    def last_states(self) -> PairStates | None:
        return next((m for m in reversed(self.heard) if isinstance(m, PairStates)), None)

    @property
    def reports(self) -> list[RouterReport]:
        return [m for m in self.heard if isinstance(m, RouterReport)]
