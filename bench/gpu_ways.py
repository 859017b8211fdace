"""The ways of answering one prompt that are measured against each other, and one answer of each."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import aiohttp
import msgspec
from gpu_engines import Server

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

    async def take(self, session: aiohttp.ClientSession, prompt: Prompt, key: str) -> Taken: ...


class Direct:
    """Straight to one engine's HTTP server."""

    def __init__(self, name: str, engine: Engine, url: str, model: str) -> None:
        self.name, self._url, self._model = name, url, model
        self._column = Column(path=name, engines=(engine,), decode=name)

    @classmethod
    def of(cls, server: Server, engine: Engine) -> Direct:
        return cls(server.name, engine, server.url, server.model)

    async def take(self, session: aiohttp.ClientSession, prompt: Prompt, key: str) -> Taken:
        body = request_body(self._model, self._column, prompt, OUTPUT_TOKENS, f"{key}/{self.name}")
        client = Client(session, self._url, timeout_s=TIMEOUT_S)
        return Taken(await client.complete(Ask(path=self.name, body=body)))


class Routed:
    """Through a running cluster's router, on one path."""

    def __init__(self, target: Target, column: Column) -> None:
        self.name = column.path
        self._column, self._target = column, target

    async def take(self, session: aiohttp.ClientSession, prompt: Prompt, key: str) -> Taken:
        target, column = self._target, self._column
        client = Client(session, target.url, timeout_s=TIMEOUT_S, headers=target.headers)
        body = request_body(
            target.plan.model, column, prompt, OUTPUT_TOKENS, f"{key}/{column.path}"
        )
        before = await client.status()
        sample = await client.complete(Ask(path=column.path, body=body))
        return Taken(sample, moved(before, await client.status(), column))


class Nixl:
    """vLLM's own handoff: the client asks one engine after the other, as its proxies do."""

    def __init__(self, sender: Server, receiver: Server) -> None:
        self.name = f"{sender.name}>{receiver.name}"
        self._sender, self._receiver = self.ends = (sender, receiver)
        self._column = Column(path=self.name, engines=(Engine.VLLM,), decode=receiver.name)

    async def take(self, session: aiohttp.ClientSession, prompt: Prompt, key: str) -> Taken:
        salt = f"{key}/{self.name}"
        body = request_body(self._receiver.model, self._column, prompt, OUTPUT_TOKENS, salt)
        started_s = time.perf_counter()
        params = await self._prefilled(session, body)
        prefilled_s = time.perf_counter() - started_s
        client = Client(session, self._receiver.url, timeout_s=TIMEOUT_S)
        ask = Ask(path=self.name, body={**body, "kv_transfer_params": params})
        sample = await client.complete(ask)
        if sample.ttft_s is None:
            return Taken(sample)
        return Taken(msgspec.structs.replace(sample, ttft_s=prefilled_s + sample.ttft_s))

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
