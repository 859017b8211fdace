"""What the router adds to the time to the first token, against the engine directly.

One MLX replica of a tiny random checkpoint, routers of two policies in processes of their own:
`prefix` reads each prompt, and has no choice here. The same streaming request goes to the replica
and through each router by turns, so that whatever else the machine does meets all; the figure is
the median of each, and of the paired differences. The prompt cache is off. Target: at most 3 ms.

    python bench/router_ttft.py [--requests 200] [--prompt-tokens 51,700] [--output DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
from setting import RESULTS, machine, summary, write

from pdctl.engines.channel import SOCKET_ENV

# `setting` has put the tests into the path
import tiny  # isort: skip
from runtime.router import engines  # isort: skip
from runtime.router.cluster import MODEL  # isort: skip

TARGET_MS = 3.0
POLICIES = ("round_robin", "prefix")
WARM_UPS = 10


async def ttft_s(http: aiohttp.ClientSession, url: str, tokens: int, seed: int) -> float:
    """Seconds from the request to the first `data` line of its answer."""
    body = {
        "model": MODEL,
        "prompt": tiny.digits(tokens, seed),
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


async def measured(requests: int, lens: list[int]) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = tiny.make_checkpoint(folder / "model", "llama")
        plain = engines.assignment_of("o0")
        agents = {}
        for policy in POLICIES:
            assignment = msgspec.structs.replace(plain, policy=policy, model_dir=str(model))
            agents[policy] = engines.StubAgent(str(folder / f"{policy}.sock"), assignment)
            server = await asyncio.start_unix_server(agents[policy].serve, agents[policy].path)
            stack.callback(server.close)
        first, *others = POLICIES
        replica = await engines.start_replica(plain.plan.replicas[0], model, agents[first].path)
        stack.push_async_callback(engines.stop_process, replica)
        urls = {first: await _routed(stack, agents[first])}
        member = agents[first].members["o0"]
        urls["direct"] = f"http://{member.http_host}:{member.http_port}"
        for policy in others:
            agents[policy].members["o0"] = member
            urls[policy] = await _routed(stack, agents[policy])
        http = await stack.enter_async_context(aiohttp.ClientSession())
        return [await _sampled(http, urls, tokens, requests) for tokens in lens]


async def _routed(stack: AsyncExitStack, agent: engines.StubAgent) -> str:
    """The URL of a router that is ready."""
    router = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdctl.runtime.router"),
        env={**os.environ, SOCKET_ENV: agent.path},
    )
    stack.push_async_callback(engines.stop_process, router)
    with anyio.fail_after(engines.START_S):
        while agent.states is None or agent.states.replicas[0].state != "ready":
            agent.announced.clear()
            await agent.announced.wait()
    return str(agent.states.url)


async def _sampled(
    http: aiohttp.ClientSession, urls: dict[str, str], tokens: int, requests: int
) -> dict[str, Any]:
    samples: dict[str, list[float]] = {name: [] for name in urls}
    names = list(urls)
    for turn in range(WARM_UPS + requests):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            taken_s = await ttft_s(http, f"{urls[name]}/v1/completions", tokens, turn)
            if turn >= WARM_UPS:
                samples[name].append(taken_s * 1000)
    added = {
        policy: [
            through - directly
            for through, directly in zip(samples[policy], samples["direct"], strict=True)
        ]
        for policy in POLICIES
    }
    return {
        "prompt_tokens": tokens,
        "ttft_ms": {name: summary(taken) for name, taken in samples.items()},
        "added_ttft_ms": {policy: summary(taken) for policy, taken in added.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--prompt-tokens", default="51,700")
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args()
    lens = [int(tokens) for tokens in asked.prompt_tokens.split(",")]
    results = asyncio.run(measured(asked.requests, lens))
    added = [each["added_ttft_ms"][policy]["median"] for each in results for policy in POLICIES]
    met = max(added) <= TARGET_MS
    report = {
        "method": " ".join((__doc__ or "").split("\n\n")[1].split()),
        "requests": asked.requests,
        "target_ms": TARGET_MS,
        "met": met,
        "results": results,
        "machine": machine("aiohttp", "mlx", "mlx-lm"),
    }
    path = write(asked.output, "router_ttft", report)
    for each in results:
        for name, taken in each["ttft_ms"].items():
            more = each["added_ttft_ms"].get(name, {}).get("median", 0.0)
            line = f"{each['prompt_tokens']:5} tokens, {name:11} median {taken['median']:8.3f} ms"
            print(f"{line}  added {more:6.3f} ms")
    print(f"target {TARGET_MS} ms: {'met' if met else 'missed'}; {path}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
