"""A cluster whose clients leave, and whose prefill replicas are killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from gpu_answers import Answer, Comparison, End, answer, body_of, compared

from pdctl.runtime.bench.client import Client
from pdctl.runtime.bench.prompts import Prompt
from pdctl.runtime.bench.status import Status
from pdctl.runtime.bench.target import Target
from pdctl.runtime.router.endpoints import COMPLETIONS

GAUGES = ("handoffs_active", "buffer_bytes_used", "waiters", "requests_active")
"""Of a replica: what requests hold."""
POLL_S = 0.1
IDLE_S = 15.0
BACK_S = 180.0
LEAVE_S = 0.5
LONG_TOKENS = 200
LEAVING = 0.5


class Known:
    """A prompt, and what engines answer alone, by engine."""

    def __init__(self, prompt: Prompt, owns: Mapping[str, Mapping[str, Answer]]) -> None:
        self.prompt = prompt
        self.owns = {engine: by_route[COMPLETIONS] for engine, by_route in owns.items()}


class Watched:
    """One running cluster, by its router's `/status`."""

    def __init__(self, http: aiohttp.ClientSession, target: Target) -> None:
        self.end = End(target.url, target.plan.model, target.headers)
        self._client = Client(http, target.url, timeout_s=10.0, headers=target.headers)

    async def status(self) -> Status:
        return await self._client.status()

    async def left(self) -> dict[str, int]:
        """What is still held once time is up, by replica and gauge; nothing where all is well."""
        until_s = time.monotonic() + IDLE_S
        while True:
            replicas = (await self.status()).replicas
            held = {
                f"{name} {gauge}": int(entry.get(gauge) or 0)
                for name, entry in replicas.items()
                for gauge in GAUGES
                if entry.get(gauge)
            }
            if not held or time.monotonic() > until_s:
                return held
            await asyncio.sleep(POLL_S)

    async def pids(self, names: Sequence[str]) -> dict[str, int]:
        replicas = (await self.status()).replicas
        return {name: int(replicas[name]["pid"]) for name in names}

    async def back(self, within_s: float) -> bool:
        """Whether every pair is ready by then."""
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            status = await self.status()
            if all(pair["state"] == "ready" for pair in status.pairs.values()):
                return True
            await asyncio.sleep(POLL_S)
        return False


def fresh(chance: random.Random) -> dict[str, Any]:
    return {"pdctl_cache": False, "cache_salt": str(chance.random())}


async def leaving(
    http: aiohttp.ClientSession,
    watched: Watched,
    path: str,
    known: Sequence[Known],
    engine: str,
    *,
    requests: int,
    clients: int,
) -> dict[str, Any]:
    """Half of them leave at a random moment; the others' answers are compared with those of that
    engine alone. What counts as wrong is for the caller to say, who has the bound. Before them as
    many as there are clients ask at once: an engine compiles at its first batch."""
    chance, numbers = random.Random(path), iter(range(requests))
    end = watched.end.pinned(path)
    bodies = [body_of(end, COMPLETIONS, each.prompt, **fresh(chance)) for each in known]
    some = itertools.islice(itertools.cycle(bodies), clients)
    await asyncio.gather(*(answer(http, end, COMPLETIONS, body) for body in some))
    before, lives = await watched.status(), await watched.pids(path.split(">"))
    found: list[Comparison] = []
    gone = 0

    async def client() -> None:
        nonlocal gone
        for _ in numbers:
            each = chance.choice(known)
            if chance.random() < LEAVING:
                left = await left_alone(http, end, each.prompt, chance)
                gone += left
            else:
                body = body_of(watched.end, COMPLETIONS, each.prompt, **fresh(chance))
                given = await answer(http, end, COMPLETIONS, body)
                own = each.owns[engine]
                found.append(compared(path, each.prompt.tokens, "beside leavers", own, given))

    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    took_s = time.monotonic() - began_s
    held, after = await watched.left(), await watched.status()
    failed = [int(status.pairs[path].get("handoffs_failed") or 0) for status in (before, after)]
    return {
        "compared": found,
        "requests": requests,
        "left_early": gone,
        "took_s": round(took_s, 1),
        "held": held,
        "handoffs_failed": failed[1] - failed[0],
        "same_processes": lives == await watched.pids(path.split(">")),
    }


async def left_alone(
    http: aiohttp.ClientSession, end: End, prompt: Prompt, chance: random.Random
) -> bool:
    """Whether the client went before the answer's end."""
    body = body_of(end, COMPLETIONS, prompt, max_tokens=LONG_TOKENS, stream=True, **fresh(chance))
    try:
        async with asyncio.timeout(chance.uniform(0.0, LEAVE_S)):
            await answer(http, end, COMPLETIONS, body)
    except TimeoutError:
        return True
    return False


async def killed(
    http: aiohttp.ClientSession, watched: Watched, paths: Sequence[str], prompt: Prompt
) -> dict[str, Any]:
    """SIGKILL to the prefill replicas of those paths while an answer of each is being written:
    it must become whole; decode lives on, and every pair comes back."""
    prefills = sorted({path.partition(">")[0] for path in paths})
    decodes = sorted({path.partition(">")[2] for path in paths})
    lives, before = await watched.pids([*prefills, *decodes]), await watched.status()
    chance = random.Random(0)
    fields = {"max_tokens": 2 * LONG_TOKENS, "stream": True, "ignore_eos": True}
    answering = {
        path: asyncio.ensure_future(
            answer(
                http,
                watched.end.pinned(path),
                COMPLETIONS,
                body_of(watched.end, COMPLETIONS, prompt, **fields, **fresh(chance)),
            )
        )
        for path in paths
    }
    await handed_over(watched, paths, before)
    for name in prefills:
        os.kill(lives[name], signal.SIGKILL)
    began_s = time.monotonic()
    answers = {path: await each for path, each in answering.items()}
    refused = await answer(
        http,
        watched.end.pinned(paths[0]),
        COMPLETIONS,
        body_of(watched.end, COMPLETIONS, prompt, max_tokens=2, **fresh(chance)),
    )
    back = await watched.back(BACK_S)
    return {
        "answers": {path: each.error or "whole" for path, each in answers.items()},
        "meanwhile": refused.error or "answered",
        "back_s": round(time.monotonic() - began_s, 1) if back else None,
        "decode_lives": {n: lives[n] for n in decodes} == await watched.pids(decodes),
    }


async def handed_over(watched: Watched, paths: Sequence[str], before: Status) -> None:
    """Until a handoff of each path has ended since then."""
    until_s = time.monotonic() + IDLE_S
    while time.monotonic() < until_s:
        pairs = (await watched.status()).pairs
        if all(_completed(pairs[path]) > _completed(before.pairs[path]) for path in paths):
            return
        await asyncio.sleep(POLL_S / 4)


def _completed(pair: Mapping[str, Any]) -> int:
    return int(pair.get("handoffs_completed") or 0)
