"""The ways of answering one prompt that are measured against each other, and one answer of each."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import aiohttp
import msgspec
from gpu_engines import Server

from pdctl.errors import PdctlError
from pdctl.runtime.bench.client import Ask, Client, Sample
from pdctl.runtime.bench.columns import Column
from pdctl.runtime.bench.measure import request_body
from pdctl.runtime.bench.prompts import Prompt
from pdctl.runtime.bench.status import Moved, moved
from pdctl.runtime.bench.target import Target
from pdctl.runtime.router.endpoints import COMPLETIONS
from pdctl.topology.model import Engine

TIMEOUT_S = 60.0
OUTPUT_TOKENS = 6
"""The first one is what is timed; those after it give the decode step."""


class Taken(NamedTuple):
    sample: Sample
    moved: Moved | None = None


class Way(Protocol):
    name: str
    """Of a pair: "P>D"."""

    async def take(
        self,
        session: aiohttp.ClientSession,
        prompt: Prompt,
        key: str,
        output_tokens: int = OUTPUT_TOKENS,
    ) -> Taken: ...


class Direct:
    """Straight to one engine's HTTP server."""

    def __init__(
        self, name: str, engine: Engine, url: str, model: str, *, cached: bool = False
    ) -> None:
        """`cached`: the engine's prefix cache is looked at, under one salt."""
        self.name, self._url, self._model, self._cached = name, url, model, cached
        self._column = Column(path=name, engines=(engine,), decode=name)

    @classmethod
    def of(cls, server: Server) -> Direct:
        return cls(server.name, Engine(server.name), server.url, server.model)

    @classmethod
    def within(cls, target: Target, replica: str, name: str, *, cached: bool = False) -> Direct:
        """A replica of a cluster, past its router."""
        found = target.plan.replica(replica)
        url = f"http://{found.http_host}:{found.http_port}"
        return cls(name, found.engine, url, target.plan.model, cached=cached)

    async def take(
        self,
        session: aiohttp.ClientSession,
        prompt: Prompt,
        key: str,
        output_tokens: int = OUTPUT_TOKENS,
    ) -> Taken:
        salt = f"{key}/{self.name}"
        body = request_body(self._model, self._column, prompt, output_tokens, salt)
        if self._cached:
            del body["pdctl_cache"]
            body.pop("cache_salt", None)
        client = Client(session, self._url, timeout_s=TIMEOUT_S)
        return Taken(await client.complete(Ask(path=self.name, body=body)))


class Routed:
    """Through a running cluster's router, on one path. `counted`: what moved is looked up before
    and after, which tells nothing where several are asked at once."""

    def __init__(self, target: Target, column: Column, *, counted: bool = True) -> None:
        self.name = column.path
        self.column = column
        self._target, self._counted = target, counted

    async def take(
        self,
        session: aiohttp.ClientSession,
        prompt: Prompt,
        key: str,
        output_tokens: int = OUTPUT_TOKENS,
    ) -> Taken:
        target, column = self._target, self.column
        client = Client(session, target.url, timeout_s=TIMEOUT_S, headers=target.headers)
        salt = f"{key}/{column.path}"
        body = request_body(target.plan.model, column, prompt, output_tokens, salt)
        ask = Ask(path=column.path, body=body)
        if not self._counted:
            return Taken(await client.complete(ask))
        before = await client.status()
        sample = await client.complete(ask)
        return Taken(sample, moved(before, await client.status(), column))


class Nixl:
    """vLLM's own handoff: the client asks one engine after the other, as its proxies do."""

    def __init__(self, sender: Server, receiver: Server) -> None:
        self.name = f"{sender.name}>{receiver.name}"
        self._sender, self._receiver = sender, receiver
        self._column = Column(path=self.name, engines=(Engine.VLLM,), decode=receiver.name)

    async def take(
        self,
        session: aiohttp.ClientSession,
        prompt: Prompt,
        key: str,
        output_tokens: int = OUTPUT_TOKENS,
    ) -> Taken:
        salt = f"{key}/{self.name}"
        body = request_body(self._receiver.model, self._column, prompt, output_tokens, salt)
        started_s = time.perf_counter()
        params = await self._prefilled(session, body)
        prefilled_s = time.perf_counter() - started_s
        client = Client(session, self._receiver.url, timeout_s=TIMEOUT_S)
        ask = Ask(path=self.name, body={**body, "kv_transfer_params": params})
        sample = await client.complete(ask)
        if sample.ttft_s is None:
            return Taken(sample)
        whole = {"ttft_s": prefilled_s + sample.ttft_s, "e2el_s": prefilled_s + sample.e2el_s}
        return Taken(msgspec.structs.replace(sample, **whole))

    async def _prefilled(
        self, session: aiohttp.ClientSession, body: dict[str, Any]
    ) -> dict[str, Any]:
        asked = {key: value for key, value in body.items() if key != "stream_options"}
        asked |= {"stream": False, "max_tokens": 1, "ignore_eos": False}
        asked["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        async with session.post(self._sender.url + COMPLETIONS, json=asked) as response:
            answer = await response.json()
        return dict(answer["kv_transfer_params"])


class Named:
    """A way under another name."""

    def __init__(self, name: str, way: Way) -> None:
        self.name, self._way = name, way

    async def take(
        self,
        session: aiohttp.ClientSession,
        prompt: Prompt,
        key: str,
        output_tokens: int = OUTPUT_TOKENS,
    ) -> Taken:
        return await self._way.take(session, prompt, key, output_tokens)


async def taken(
    way: Way,
    session: aiohttp.ClientSession,
    prompt: Prompt,
    key: str,
    output_tokens: int = OUTPUT_TOKENS,
) -> Taken:
    """A failure is a sample, too."""
    try:
        return await way.take(session, prompt, key, output_tokens)
    except (aiohttp.ClientError, OSError, KeyError, PdctlError) as error:
        said = f"{type(error).__name__}: {error}"
        return Taken(Sample(started_s=time.perf_counter(), error=said))
