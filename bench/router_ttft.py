"""What the router adds to the time to the first token, against the engine directly.

One MLX replica of a tiny random checkpoint, the router in a process of its own. The same
streaming request goes to the replica and through the router by turns, so that whatever else
the machine does meets both; the figure is the median of each, and of the paired differences.
The prompt cache is off. Target: at most 3 ms.

    python bench/router_ttft.py [--requests 200] [--output DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import anyio
from setting import RESULTS, machine, summary, write

from pdctl.engines.channel import SOCKET_ENV

# `setting` has put the tests into the path
import tiny  # isort: skip
from runtime.router import engines  # isort: skip
from runtime.router.cluster import MODEL  # isort: skip

TARGET_MS = 3.0
PROMPT_TOKENS = 51
WARM_UPS = 10


async def ttft_s(http: aiohttp.ClientSession, url: str, seed: int) -> float:
    """Seconds from the request to the first `data` line of its answer."""
    body = {
        "model": MODEL,
        "prompt": tiny.digits(PROMPT_TOKENS, seed),
        "max_tokens": 2,
        "temperature": 0.0,
        "stream": True,
        "pdctl_cache": False,
    }
    began_s = time.perf_counter()
    async with http.post(url, json=body) as response:
        response.raise_for_status()
        first_s = None
        async for line in response.content:
            if first_s is None and line.startswith(b"data:"):
                first_s = time.perf_counter()
        if first_s is None:
            raise RuntimeError("an answer without an event")
    return first_s - began_s


async def measured(requests: int) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        assignment = engines.assignment_of("o0")
        agent = engines.StubAgent(str(folder / "agent.sock"), assignment)
        server = await asyncio.start_unix_server(agent.serve, agent.path)
        stack.callback(server.close)
        model = tiny.make_checkpoint(folder / "model", "llama")
        replica = await engines.start_replica(assignment.plan.replicas[0], model, agent.path)
        stack.push_async_callback(engines.stop_process, replica)
        router = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pdctl.runtime.router"),
            env={**os.environ, SOCKET_ENV: agent.path},
        )
        stack.push_async_callback(engines.stop_process, router)
        await _ready(agent)
        assert agent.states is not None
        member = agent.members["o0"]
        urls = {
            "direct": f"http://{member.http_host}:{member.http_port}/v1/completions",
            "router": f"{agent.states.url}/v1/completions",
        }
        http = await stack.enter_async_context(aiohttp.ClientSession())
        return await _sampled(http, urls, requests)


async def _ready(agent: engines.StubAgent) -> None:
    with anyio.fail_after(engines.START_S):
        while agent.states is None or agent.states.replicas[0].state != "ready":
            agent.announced.clear()
            await agent.announced.wait()


async def _sampled(
    http: aiohttp.ClientSession, urls: dict[str, str], requests: int
) -> dict[str, Any]:
    samples: dict[str, list[float]] = {name: [] for name in urls}
    for turn in range(WARM_UPS + requests):
        order = list(urls) if turn % 2 else list(reversed(urls))
        for name in order:
            taken_s = await ttft_s(http, urls[name], turn)
            if turn >= WARM_UPS:
                samples[name].append(taken_s * 1000)
    pairs = zip(samples["router"], samples["direct"], strict=True)
    added = [through - directly for through, directly in pairs]
    return {
        **{f"{name}_ttft_ms": summary(taken) for name, taken in samples.items()},
        "added_ttft_ms": summary(added),
        "difference_of_medians_ms": round(
            statistics.median(samples["router"]) - statistics.median(samples["direct"]), 3
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args()
    results = asyncio.run(measured(asked.requests))
    met = results["added_ttft_ms"]["median"] <= TARGET_MS
    report = {
        "method": " ".join((__doc__ or "").split("\n\n")[1].split()),
        "prompt_tokens": PROMPT_TOKENS,
        "requests": asked.requests,
        "target_ms": TARGET_MS,
        "met": met,
        **results,
        "machine": machine("aiohttp", "mlx", "mlx-lm"),
    }
    path = write(asked.output, "router_ttft", report)
    for name in ("direct_ttft_ms", "router_ttft_ms", "added_ttft_ms"):
        print(f"{name:16} median {results[name]['median']:8.3f}  p95 {results[name]['p95']:8.3f}")
    print(f"target {TARGET_MS} ms: {'met' if met else 'missed'}; {path}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
