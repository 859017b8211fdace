"""Cells of `disaggregate = "auto"`: one link and one prompt length, on three paths by turns."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp

WORSE, CELLS, OFF = 1.05, 0.95, 0.25
AUTO = "auto"
LEAST_ROUNDS = 3


class Paths(NamedTuple):
    alone: str
    pair: str


class Taken:
    """One request: milliseconds, the path that it took, what was expected of each."""

    def __init__(self, ttft_ms: float, headers: Any) -> None:
        self.ttft_ms = ttft_ms
        self.path = headers["x-pdctl-path"]
        decision = headers.get("x-pdctl-decision", "")
        self.reason = decision.partition(";")[0]
        found = re.findall(r"(\S+)=([\d.e+]+)ms", decision)
        self.expected_ms = {path: float(ms) for path, ms in found}


async def asked(
    http: aiohttp.ClientSession, url: str, model: str, prompt: str, pin: str | None
) -> Taken:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 2,
        "temperature": 0.0,
        "stream": True,
        "pdctl_cache": False,
        "cache_salt": prompt[:32],
    }
    began_s = time.perf_counter()
    headers = {} if pin is None else {"x-pdctl-path": pin}
    async with http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        first_s = None
        async for line in answer.content:
            if first_s is None and line.startswith(b"data:"):
                first_s = time.perf_counter()
        if first_s is None:
            raise RuntimeError("an answer without an event")
        return Taken((first_s - began_s) * 1e3, answer.headers)


async def cell(
    url: str,
    model: str,
    paths: Paths,
    prompt_of: Callable[[int, int], str],
    rounds: int,
    *,
    within_s: float = float("inf"),
) -> dict[str, list[Taken]]:
    """Rounds at one length, in every order: what ran before leaves warm and cold cores. Once
    `within_s` are over, no round is begun beyond the third.

    Args:
        prompt_of: (round, place in it) → a prompt that is like no other.
    """
    taken: dict[str, list[Taken]] = {AUTO: [], paths.alone: [], paths.pair: []}
    orders = list(itertools.permutations(taken))
    until_s = time.monotonic() + within_s
    async with aiohttp.ClientSession() as http:
        for turn in range(rounds):
            if turn >= LEAST_ROUNDS and time.monotonic() > until_s:
                break
            for place, name in enumerate(orders[turn % len(orders)]):
                pin = None if name == AUTO else name
                prompt = prompt_of(turn, place)
                taken[name].append(await asked(http, url, model, prompt, pin))
    return taken


def summed(paths: Paths, rate: int, tokens: int, taken: dict[str, list[Taken]]) -> dict[str, Any]:
    medians = {name: statistics.median(t.ttft_ms for t in each) for name, each in taken.items()}
    off = [
        abs(expected / medians[path] - 1)
        for one in taken[AUTO]
        for path, expected in one.expected_ms.items()
    ]
    return {
        "link_bytes_per_s": rate,
        "prompt_tokens": tokens,
        "ttft_ms": {name: round(value, 3) for name, value in medians.items()},
        "auto_of_better": round(medians[AUTO] / min(medians[path] for path in paths), 4),
        "auto_took": {path: sum(t.path == path for t in taken[AUTO]) for path in paths},
        "reasons": {r: sum(t.reason == r for t in taken[AUTO]) for r in
                    sorted({t.reason for t in taken[AUTO]})},
        "first_expected_ms": taken[AUTO][0].expected_ms,
        "expected_off": round(statistics.median(off), 4),
        "samples_ms": {n: [round(t.ttft_ms, 3) for t in each] for n, each in taken.items()},
    }  # fmt: skip


def plans_off(cells: list[dict[str, Any]], plans: list[dict[str, Any]]) -> list[float]:
    """How far what `plan` said right after `up` is from the medians that came."""
    off = []
    for plan in plans:
        for path in plan["forecast"]["paths"]:
            for predicted in path["cells"]:
                off += [
                    abs(predicted["ttft_ms"] / c["ttft_ms"][path["path"]] - 1)
                    for c in cells
                    if c["prompt_tokens"] == predicted["tokens"]
                    and c["link_bytes_per_s"] == plan["link_bytes_per_s"]
                    and path["path"] in c["ttft_ms"]
                ]
    return off


def verdict(cells: list[dict[str, Any]], plans: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all cells, beside the targets."""
    good = sum(each["auto_of_better"] <= WORSE for each in cells) / len(cells)
    plan_off = statistics.median(plans_off(cells, plans))
    router_off = statistics.median(each["expected_off"] for each in cells)
    return {
        "targets": {"auto_of_better": WORSE, "share_of_cells": CELLS, "off": OFF},
        "share_of_cells": round(good, 4),
        "plan_off": round(plan_off, 4),
        "router_off": round(router_off, 4),
        "met": good >= CELLS and max(plan_off, router_off) <= OFF,
    }


def said(found: dict[str, Any], cells: int) -> str:
    return (
        f"auto ≤ {WORSE} × the better in {found['share_of_cells']:.0%} of {cells} cells; plan off "
        f"by {found['plan_off']:.0%}, router by {found['router_off']:.0%}: "
        f"{'met' if found['met'] else 'missed'}"
    )
