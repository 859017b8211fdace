"""Load: many clients at once, and many that go away."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
from e2e.cluster import Cluster, text_of
from e2e.prompts import exact_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CLIENTS = 16
SOAK_S = float(os.environ.get("PDCTL_TEST_SOAK_S", "120"))
CANCELS = 200
PROMPTS = 24
OUTPUT_TOKENS = 12


@pytest.fixture(scope="module")
def answers(llama: Cluster, checkpoints: dict[str, Path]) -> dict[str, str]:
    """Prompt → the text of the ordinary replica."""
    rng = random.Random(0)
    prompts = [
        exact_prompt(checkpoints["llama"], rng.randrange(20, 260), seed=100 + i)
        for i in range(PROMPTS)
    ]
    return {p: text_alone(llama, p) for p in prompts}


def text_alone(cluster: Cluster, prompt: str) -> str:
    answer = cluster.completion(prompt, "o0", max_tokens=OUTPUT_TOKENS, pdctl_cache=False)
    return str(answer.json()["choices"][0]["text"])


def footprint(cluster: Cluster) -> dict[str, tuple[int, int]]:
    """Replica → (resident MiB, open file descriptors)."""
    found = {}
    for replica in cluster.status()["replicas"]:
        process = psutil.Process(replica["pid"])
        found[replica["name"]] = (process.memory_info().rss >> 20, process.num_fds())
    return found


def test_sixteen_streaming_clients_for_two_minutes(llama: Cluster, answers: dict[str, str]) -> None:
    """U3, U7, U17: every answer is complete and right; memory and descriptors stay flat."""
    wrong: list[str] = []
    served = [0] * CLIENTS
    deadline = time.monotonic() + SOAK_S

    def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < deadline:
            prompt = rng.choice(list(answers))
            events = llama.stream(
                "/v1/completions", {"prompt": prompt, "max_tokens": OUTPUT_TOKENS}, "p0>d0"
            )
            if text_of(events) != answers[prompt]:
                wrong.append(f"{prompt[:20]}: {text_of(events)!r} != {answers[prompt]!r}")
            served[number] += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(client, n) for n in range(CLIENTS)]
        time.sleep(SOAK_S / 3)
        warm = footprint(llama)
        for future in running:
            future.result(timeout=SOAK_S + 120)
    end = footprint(llama)
    print(f"\n{sum(served)} requests; MiB and descriptors warm {warm}, at the end {end}")  # noqa: T201
    assert not wrong, wrong[:3]
    assert min(served) > 0
    llama.wait("idle", llama.idle, 10)
    for name, (mib, descriptors) in end.items():
        assert descriptors <= warm[name][1] + 8, name
        assert mib <= warm[name][0] * 1.1 + 64, name


def test_two_hundred_requests_cancelled_at_random_points(
    llama: Cluster, answers: dict[str, str]
) -> None:
    """U1, U4, U5, U34: cancelled in queue, prefill, transfer or decode; zero leftovers."""
    rng = random.Random(7)
    plans = [(rng.choice(list(answers)), rng.uniform(0.0, 0.6)) for _ in range(CANCELS)]

    def cancelled(plan: tuple[str, float]) -> None:
        prompt, after_s = plan
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 400, "stream": True}
        timeout = httpx.Timeout(30, read=max(0.01, after_s))
        try:
            with llama.http.stream(
                "POST",
                "/v1/completions",
                json=body,
                headers={"x-pdctl-path": "p0>d0"},
                timeout=timeout,
            ) as answer:
                ends = time.monotonic() + after_s
                for _ in answer.iter_lines():
                    if time.monotonic() > ends:
                        return
        except httpx.TimeoutException:
            return

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(cancelled, plans))
    llama.wait("idle after the cancels", llama.idle, 15)
    for prompt in list(answers)[:4]:
        events = llama.stream(
            "/v1/completions", {"prompt": prompt, "max_tokens": OUTPUT_TOKENS}, "p0>d0"
        )
        assert text_of(events) == answers[prompt]
    assert llama.idle()
