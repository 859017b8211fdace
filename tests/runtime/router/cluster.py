"""A router over fake engines, in one event loop, with a check that nothing stays open."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path as FilePath
from typing import Any

import aiohttp
import anyio
import msgspec
from runtime.router.fakes import FakeEngine, StubKeeper, engine_of

from pdctl.engines.channel import RouterAssignment
from pdctl.runtime.router.server import Router, attached
from pdctl.topology.contract import Attention, Contract, Positions
from pdctl.topology.model import (
    ComputeDtype,
    Disaggregate,
    Dtype,
    OnFailure,
    Replica,
    Role,
    Transport,
)
from pdctl.topology.plan import PairPlan, Plan, ReplicaPlan
from pdctl.topology.sharing import StorePlan

MODEL = "tiny"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
STREAM = {**CHAT, "stream": True}
COMPLETION = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
PATIENCE_S = 30.0
"""Far beyond anything that passes; only a failing test waits for it."""

_ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "o": Role.BOTH}


def contract() -> Contract:
    return Contract(
        weights="w",
        tokenizer="t",
        chat_template="c",
        attention=Attention(kind="full", layers=4, kv_heads=2, head_dim=64),
        positions=Positions(rope_theta=1e4, max_positions=2048, context_length=2048),
        dtype=Dtype.FLOAT16,
    )


def plan_of(names: str, *, timeout_s: float = 20.0, transport: Transport = Transport.TCP) -> Plan:
    """A plan of replicas by name: p0 prefills, d0 decodes, o0 is an ordinary replica."""
    native = transport is Transport.NATIVE
    replicas = tuple(_replica(name, native=native) for name in names.split())
    pairs = tuple(
        PairPlan(prefill=p.name, decode=d.name, transport=transport, reason="one host")
        for p in replicas
        for d in replicas
        if p.role is Role.PREFILL and d.role is Role.DECODE
    )
    return Plan(
        cluster="test",
        model=MODEL,
        dtype=Dtype.FLOAT16,
        context_length=2048,
        contract_digest=contract().digest,
        token_kv_bytes=2048,
        page_bytes=131072,
        buffer_bytes=1 << 20,
        timeout_s=timeout_s,
        router_host="local",
        router_bind="127.0.0.1:0",
        agent_ports={"local": 1},
        replicas=replicas,
        pairs=pairs,
    )


def _replica(name: str, *, native: bool) -> ReplicaPlan:
    role = _ROLES[name[0]]
    return ReplicaPlan(
        name=name,
        host="local",
        engine=engine_of(name),
        role=role,
        model="/m",
        dtype=Dtype.FLOAT16,
        compute_dtype=ComputeDtype.FLOAT32,
        http_port=1,
        native=native and role is not Role.BOTH,
        declared=Replica(name=name, engine=engine_of(name), role=role, model="/m"),
    )


class Cluster:
    """Engines by name, the keeper, the router, and a client session."""

    def __init__(
        self,
        engines: dict[str, FakeEngine],
        keeper: StubKeeper,
        router: Router,
        http: aiohttp.ClientSession,
    ) -> None:
        self.engines = engines
        self.keeper = keeper
        self.router = router
        self.http = http
        self.stop: Callable[[], None] = lambda: None
        """Ends the router, as a signal does."""

    def __getitem__(self, name: str) -> FakeEngine:
        return self.engines[name]

    def url(self, path: str) -> str:
        return self.router.url + path

    def post(self, path: str, body: Any, **options: Any) -> Any:
        return self.http.post(self.url(path), json=body, **options)

    async def ask(self, body: dict[str, Any], **headers: str) -> aiohttp.ClientResponse:
        """Posts to the endpoint that the body belongs to and reads the whole answer."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        with anyio.fail_after(PATIENCE_S):
            response = await self.http.post(self.url(path), json=body, headers=sent)
            await response.read()
        return response

    async def ready(self, *paths: str) -> None:
        await eventually(lambda: set(paths) <= {p.text for p in self.router.roster.ready()})

    def forget(self) -> None:
        """After the canaries: what follows is the test's own."""
        for engine in self.engines.values():
            engine.bodies.clear()
            engine.aborted.clear()
            engine.stalled.clear()

    async def nothing_open(self) -> None:
        """Every leg, abort, connection in use and task of a request is gone."""
        await eventually(self._is_idle)

    def _is_idle(self) -> bool:
        aborter = self.router.aborter
        return (
            all(engine.open == 0 for engine in self.engines.values())
            and all(seat.active == 0 for seat in self.router.roster.seats())
            and aborter is not None
            and aborter.running == 0
            and self.router.meter.active == 0
            and self.router.connections_in_use == 0
            and not _request_tasks()
        )


def error_of(raw: bytes) -> dict[str, Any]:
    """OpenAI's error object, whole."""
    error: dict[str, Any] = json.loads(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def eventually(condition: Callable[[], bool]) -> None:
    """Until the condition holds; TimeoutError after PATIENCE_S."""
    with anyio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.002)


def _request_tasks() -> list[str]:
    """Tasks of one request's legs, watchers and aborts that still exist."""
    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    return [name for name in names if name.startswith(("Attempt.", "Aborter.", "Front._gen"))]


@contextlib.asynccontextmanager
async def cluster(
    names: str = "p0 d0",
    *,
    timeout_s: float = 20.0,
    policy: str = "round_robin",
    api_key: str | None = None,
    on_failure: OnFailure = OnFailure.ERROR,
    disaggregate: Disaggregate = Disaggregate.ALWAYS,
    costs_path: str = "",
    canaries: bool = True,
    transport: Transport = Transport.TCP,
    model_dir: FilePath | None = None,
    shares: bool = False,
    set_up: Callable[[dict[str, FakeEngine]], None] = lambda engines: None,
) -> AsyncIterator[Cluster]:
    """Starts everything; with `canaries`, waits until every path takes traffic. On the way
    out asserts that nothing of any request is left."""
    plan = plan_of(names, timeout_s=timeout_s, transport=transport)
    if shares:
        stores = (StorePlan(host="local", buffer_bytes=1 << 20),)
        plan = msgspec.structs.replace(plan, stores=stores)
    assignment = RouterAssignment(
        cluster="test",
        run="run1",
        key=bytes(32),
        plan=plan,
        contract=contract(),
        api_key=api_key,
        policy=policy,
        on_failure=on_failure,
        disaggregate=disaggregate,
        costs_path=costs_path,
        model_dir=str(model_dir or ""),
    )
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        keeper = StubKeeper(str(FilePath(folder) / "agent.sock"), assignment)
        for replica in plan.replicas:
            engine = keeper.engines[replica.name] = FakeEngine(replica.name, replica.role)
            await engine.start()
            stack.push_async_callback(engine.kill)
        set_up(keeper.engines)
        await keeper.start()
        stack.push_async_callback(keeper.stop)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        router = Router(*await attached(keeper.path))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        started = anyio.Event()
        life = anyio.CancelScope()

        async def live() -> None:
            with life:
                await router.run(started=started)

        tasks.start_soon(live)
        await started.wait()
        running = Cluster(keeper.engines, keeper, router, http)
        running.stop = life.cancel
        if canaries:
            await running.ready(*(path.text for path in router.roster.paths))
            running.forget()
            await running.nothing_open()
        yield running
        for engine in keeper.engines.values():
            engine.release.set()
        await running.nothing_open()
