"""What a pair answers beside what its prefill engine answers alone, by OpenAI's two routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
import gpu_engines

from pdctl.runtime.bench.client import error_text
from pdctl.runtime.bench.events import DONE, Events
from pdctl.runtime.bench.prompts import Prompt
from pdctl.runtime.router.endpoints import CHAT_COMPLETIONS, COMPLETIONS, PATH_HEADER, ROOM_HEADER

# `gpu_engines` has put the tests into the path
from agreement import NEAR_TIE_NATS, lead_where_parted, moved_nats  # isort: skip
from agreement import ranking, steps_of  # isort: skip

ROUTES = (COMPLETIONS, CHAT_COMPLETIONS)
TIMEOUT_S = 120.0
OUTPUT_TOKENS = 12
NEVER = 1e3
"""Nats, of an answer that goes on where the engine alone has ended."""


@dataclass(frozen=True)
class End:
    """Where is asked: a router, or one engine's own server."""

    url: str
    model: str
    headers: Mapping[str, str]

    @classmethod
    def of(cls, server: gpu_engines.Server) -> End:
        return cls(server.url, server.model, {})

    def pinned(self, path: str) -> End:
        return End(self.url, self.model, {**self.headers, PATH_HEADER: path})


class Answer(NamedTuple):
    text: str = ""
    prompt_tokens: int = 0
    error: str = ""
    whole: dict[str, Any] = {}  # noqa: RUF012
    room: str = ""
    path: str = ""


Owns = dict[str, dict[str, Answer]]
"""By engine and route: what each engine answers one prompt alone."""


def session() -> aiohttp.ClientSession:
    limit = aiohttp.ClientTimeout(total=TIMEOUT_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limit)


def body_of(end: End, route: str, prompt: Prompt, **fields: Any) -> dict[str, Any]:
    """Greedy, and outside of every prompt cache where the fields bring a `cache_salt`."""
    said = (
        {"prompt": prompt.text}
        if route == COMPLETIONS
        else {"messages": [{"role": "user", "content": prompt.text}]}
    )
    # each engine hides special tokens as it likes
    usual = {"max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "skip_special_tokens": False}
    return {"model": end.model, **said, **usual, **fields}


async def answer(
    http: aiohttp.ClientSession, end: End, route: str, body: Mapping[str, Any]
) -> Answer:
    """Errors are in it, those of a stream too."""
    try:
        async with http.post(end.url + route, json=dict(body), headers=end.headers) as response:
            room = response.headers.get(ROOM_HEADER, "")
            path = response.headers.get(PATH_HEADER, "")
            if response.status != 200:
                said = error_text(response.status, await response.read())
                return Answer(error=said, room=room, path=path)
            if body.get("stream"):
                return (await _streamed(response))._replace(room=room, path=path)
            whole = await response.json()
            count = whole["usage"]["prompt_tokens"]
            return Answer(text_of(whole), count, whole=whole, room=room, path=path)
    except (aiohttp.ClientError, TimeoutError, KeyError) as error:
        return Answer(error=f"{type(error).__name__}: {error}")


async def _streamed(response: aiohttp.ClientResponse) -> Answer:
    events, text, done = Events(), "", False
    async for piece in response.content.iter_any():
        for payload in events.feed(piece):
            if payload == DONE:
                done = True
                continue
            event = json.loads(payload)
            if "error" in event:
                return Answer(text, error=f"in the stream: {event['error'].get('message')}")
            text += text_of(event)
    return Answer(text, error="" if done else "the stream ended before [DONE]")


def text_of(found: Mapping[str, Any]) -> str:
    """Of a whole answer or an event, of either route."""
    if not found.get("choices"):
        return ""
    choice = found["choices"][0]
    part = choice.get("message") or choice.get("delta")
    return str((part.get("content") if part is not None else choice.get("text")) or "")


async def alone(http: aiohttp.ClientSession, end: End, route: str, prompt: Prompt) -> Answer:
    """By an engine that computes all of it, with the likeliest tokens at each place."""
    return await answer(http, end, route, body_of(end, route, prompt, **ranking(route)))


class Comparison(NamedTuple):
    """Of one answer with what an engine computes alone."""

    path: str
    tokens: int
    way: str
    lead_nats: float
    """By which the engine alone preferred its own token where they part; 0: they do not."""
    own: str = ""
    text: str = ""
    error: str = ""

    def holds(self, bound_nats: float) -> bool:
        return not self.error and self.lead_nats <= bound_nats


def compared(path: str, tokens: int, way: str, own: Answer, other: Answer) -> Comparison:
    error = own.error or other.error
    if error or own.text.strip() == other.text.strip():
        return Comparison(path, tokens, way, 0.0, error=error)
    # not every decode engine shows the space before a first word
    space = own.text[: len(own.text) - len(own.text.lstrip())]
    lead = lead_where_parted(own.whole, space + other.text.lstrip()) or NEVER
    return Comparison(path, tokens, way, round(lead, 5), own.text, other.text)


async def four(
    http: aiohttp.ClientSession, end: End, path: str, prompt: Prompt, owns: Mapping[str, Answer]
) -> tuple[list[Comparison], dict[str, int]]:
    """Chat and completion, whole and streamed, one after the other, and the tokens of the prompt
    by route."""
    found: list[Comparison] = []
    counts: dict[str, int] = {}
    for route in ROUTES:
        for stream in (False, True):
            fresh = {"pdctl_cache": False, "cache_salt": f"{path}/{route}/{stream}/{prompt.text}"}
            body = body_of(end, route, prompt, stream=stream, **fresh)
            given = await answer(http, end.pinned(path), route, body)
            way = f"{'chat' if route == CHAT_COMPLETIONS else 'completion'}{', streamed' * stream}"
            found.append(compared(path, prompt.tokens, way, owns[route], given))
            counts[route] = given.prompt_tokens or counts.get(route, 0)
    return found, counts


async def owns_of(http: aiohttp.ClientSession, ends: Mapping[str, End], prompt: Prompt) -> Owns:
    names = [(engine, route) for engine in ends for route in ROUTES]
    given = await asyncio.gather(*(alone(http, ends[e], route, prompt) for e, route in names))
    found: Owns = {engine: {} for engine in ends}
    for (engine, route), each in zip(names, given, strict=True):
        found[engine][route] = each
    return found


def bound_of(owns: list[Owns]) -> float:
    """How far one engine may lead a token that another then takes: twice the most that a log
    probability differs between two engines that compute the same prompt alone, and no less than
    what 16-bit pages move on a CPU."""
    most = 0.0
    for by_engine in owns:
        first, *others = by_engine.values()
        for other in others:
            for route in ROUTES:
                if not first[route].error and not other[route].error:
                    mine, theirs = steps_of(first[route].whole), steps_of(other[route].whole)
                    most = max(most, moved_nats(mine, theirs))
    return max(NEAR_TIE_NATS, round(2 * most, 5))
