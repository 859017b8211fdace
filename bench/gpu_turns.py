"""Conversations of several turns against a router that chooses the replica by itself."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
from gpu_report import p95

from pdctl.runtime.bench.client import error_text
from pdctl.runtime.bench.events import DONE, Events
from pdctl.runtime.bench.prompts import PromptSource
from pdctl.runtime.bench.target import Target
from pdctl.runtime.router.endpoints import COMPLETIONS, PATH_HEADER

TIMEOUT_S = 120.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one conversation."""

    ttft_s: float
    took_s: float
    text: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    path: str


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None


async def ask(
    session: aiohttp.ClientSession, target: Target, prompt: str, output_tokens: int
) -> Answer:
    """On whatever path the router takes, prompt caches and all. RuntimeError where it fails."""
    body = {
        "model": target.plan.model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s = time.perf_counter()
    first_s: float | None = None
    text, usage, events = "", _Usage(), Events()
    async with session.post(
        target.url + COMPLETIONS, json=body, headers=target.headers
    ) as response:
        if response.status != 200:
            raise RuntimeError(error_text(response.status, await response.read()))
        async for piece in response.content.iter_any():
            for payload in events.feed(piece):
                if payload == DONE:
                    continue
                chunk = msgspec.json.decode(payload, type=_Chunk)
                said = "".join(choice.text or "" for choice in chunk.choices)
                if said and first_s is None:
                    first_s = time.perf_counter() - began_s
                text, usage = text + said, chunk.usage or usage
        path = response.headers.get(PATH_HEADER, "")
    took_s = time.perf_counter() - began_s
    details = usage.prompt_tokens_details
    return Answer(
        ttft_s=took_s if first_s is None else first_s,
        took_s=took_s,
        text=text,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens if details else None) or 0,
        output_tokens=usage.completion_tokens,
        path=path,
    )


async def conversations(
    target: Target,
    source: PromptSource,
    key: str,
    *,
    clients: int,
    turns: int,
    tokens: int,
    output_tokens: int,
) -> dict[str, Any]:
    """Each client's first question has `tokens` tokens of its own and every later one an eighth
    of that more, behind all that was said before. Figures of all turns; `hit_rate` is the share
    of prompt tokens that no replica computed, of the turns after the first."""
    answers: list[list[Answer]] = [[] for _ in range(clients)]
    errors: list[str] = []

    async def converse(session: aiohttp.ClientSession, number: int) -> None:
        said = ""
        for turn in range(turns):
            length = tokens if turn == 0 else max(tokens // 8, 8)
            said += " " * bool(said) + source.prompt(length, f"{key}/{number}/{turn}").text
            try:
                answer = await ask(session, target, said, output_tokens)
            except (aiohttp.ClientError, TimeoutError, RuntimeError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                return
            answers[number].append(answer)
            said += answer.text

    limit = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(converse(session, number))
        took_s = time.perf_counter() - began_s
    return figures(answers, errors, took_s)


def figures(
    answers: Sequence[Sequence[Answer]], errors: Sequence[str], took_s: float
) -> dict[str, Any]:
    every = [answer for each in answers for answer in each]
    later = [answer for each in answers for answer in each[1:]]
    if not every:
        return {"failed": len(errors), "errors": list(errors[:3])}
    ttft_ms = [answer.ttft_s * 1e3 for answer in every]
    asked = sum(answer.prompt_tokens for answer in later)
    paths = sorted({answer.path for answer in every})
    return {
        "requests_per_s": round(len(every) / took_s, 2),
        "output_tokens_per_s": round(sum(a.output_tokens for a in every) / took_s, 1),
        "ttft_p50_ms": round(statistics.median(ttft_ms), 2),
        "ttft_p95_ms": round(p95(ttft_ms), 2),
        "hit_rate": round(sum(a.cached_tokens for a in later) / asked, 4) if asked else None,
        "by_replica": {path: sum(a.path == path for a in every) for path in paths},
        "took_s": round(took_s, 2),
        "failed": len(errors),
        **({"errors": list(errors[:3])} if errors else {}),
    }
