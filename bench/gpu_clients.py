"""Several clients at once, each of which asks again as soon as it is answered."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from gpu_report import p95
from gpu_ways import Taken, Way, taken

from pdctl.runtime.bench.prompts import Prompt, PromptSource


@dataclass(frozen=True)
class Load:
    """One way's answers to one round of one number of clients."""

    taken: list[Taken]
    took_s: float
    moved: dict[str, int] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        samples = [each.sample for each in self.taken if each.sample.ok]
        errors = [each.sample.error for each in self.taken if not each.sample.ok]
        ttft_ms = [s.ttft_s * 1e3 for s in samples if s.ttft_s is not None]
        steps_ms = [s.tpot_s * 1e3 for s in samples if s.tpot_s is not None]
        if not ttft_ms:
            return {"failed": len(errors), "errors": errors[:3]}
        return {
            "output_tokens_per_s": round(sum(s.output_tokens for s in samples) / self.took_s, 1),
            "ttft_p50_ms": round(statistics.median(ttft_ms), 2),
            "ttft_p95_ms": round(p95(ttft_ms), 2),
            "tpot_p50_ms": round(statistics.median(steps_ms), 2) if steps_ms else None,
            "took_s": round(self.took_s, 2),
            "failed": len(errors),
            **({"errors": errors[:3]} if errors else {}),
            **self.moved,
        }


class Turns:
    """Several ways, asked by turns."""

    def __init__(self, name: str, ways: Sequence[Way]) -> None:
        self.name, self._ways = name, itertools.cycle(ways)

    async def take(
        self, session: aiohttp.ClientSession, prompt: Prompt, key: str, output_tokens: int
    ) -> Taken:
        return await next(self._ways).take(session, prompt, key, output_tokens)


def prompts_of(source: PromptSource, lens: Sequence[int], count: int, key: str) -> list[Prompt]:
    return [source.prompt(lens[n % len(lens)], f"{key}/{n}") for n in range(count)]


async def load(
    way: Way, prompts: Sequence[Prompt], clients: int, output_tokens: int, key: str
) -> Load:
    """Each client asks for the next prompt as soon as it is answered."""
    left = iter(enumerate(prompts))
    found: dict[int, Taken] = {}

    async def client(session: aiohttp.ClientSession) -> None:
        for number, prompt in left:
            found[number] = await taken(way, session, prompt, f"{key}/{number}", output_tokens)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client(session))
        took_s = time.perf_counter() - began_s
    return Load([found[number] for number in sorted(found)], took_s)
