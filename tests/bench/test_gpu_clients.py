"""Loads and conversations are counted as they went."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdctl.runtime.bench.client import Sample
from pdctl.runtime.bench.prompts import Prompt


class Recording:
    """A way that answers when the others have been asked, and counts those at once."""

    def __init__(self, clients: int, failing: int = -1) -> None:
        self.name = "recording"
        self._clients, self._failing = clients, failing
        self._now = 0
        self.most = 0
        self.asked: list[str] = []

    async def take(self, session: Any, prompt: Prompt, key: str, output_tokens: int) -> Any:
        from gpu_ways import Taken

        number = len(self.asked)
        self.asked.append(prompt.text)
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(0)
        self._now -= 1
        if number == self._failing:
            raise KeyError("kv_transfer_params")
        return Taken(
            Sample(started_s=0.0, ttft_s=0.01, e2el_s=0.07, output_tokens=output_tokens, text="x")
        )


def prompts(number: int) -> list[Prompt]:
    return [Prompt(text=str(n), tokens=1) for n in range(number)]


def test_each_prompt_is_asked_once_by_as_many_clients_as_were_said() -> None:
    from gpu_clients import load

    way = Recording(3)
    found = asyncio.run(load(way, prompts(10), 3, 7, "key"))
    assert sorted(way.asked, key=int) == [str(n) for n in range(10)]
    assert way.most == 3
    figures = found.figures()
    assert figures["output_tokens_per_s"] == pytest.approx(70 / found.took_s, rel=0.01)
    assert figures["tpot_p50_ms"] == pytest.approx(10.0)
    assert figures["failed"] == 0


def test_a_failure_is_counted_and_ends_nothing() -> None:
    from gpu_clients import load

    figures = asyncio.run(load(Recording(2, failing=4), prompts(10), 2, 7, "key")).figures()
    assert figures["failed"] == 1
    assert "kv_transfer_params" in figures["errors"][0]


def test_the_hit_rate_leaves_out_first_turns() -> None:
    """Nothing of them can have been seen."""
    from gpu_turns import Answer, figures

    def answer(asked: int, cached: int, path: str) -> Answer:
        return Answer(
            ttft_s=0.1,
            took_s=0.2,
            text="t",
            prompt_tokens=asked,
            cached_tokens=cached,
            output_tokens=8,
            path=path,
        )

    told = [[answer(100, 0, "vo"), answer(200, 64, "vo2")], [answer(100, 0, "vo")]]
    found = figures(told, ["RuntimeError: 503"], 2.0)
    assert found["hit_rate"] == 0.32
    assert found["by_replica"] == {"vo": 2, "vo2": 1}
    assert found["output_tokens_per_s"] == 12.0
    assert found["failed"] == 1
