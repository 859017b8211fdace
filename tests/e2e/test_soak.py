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
PROMPTS = 16
OUTPUT_TOKENS = 12
CLEAR_GAP = 0.15
"""Nats between the best token and the next, at every step of a reference answer. Rounding
float32 keys and values to 16-bit pages moves this random model's logits by up to 0.07."""


@pytest.fixture(scope="module")
def answers(llama: Cluster, checkpoints: dict[str, Path]) -> dict[str, str]:
    return clear_answers(llama, checkpoints["llama"])


def clear_answers(cluster: Cluster, model: Path, path: str = "o0") -> dict[str, str]:
    """Prompt → the text of one MLX replica alone, where no step of it is nearly a tie."""
    rng = random.Random(0)
    found: dict[str, str] = {}
    for seed in range(100, 100 + 10 * PROMPTS):
        prompt = exact_prompt(model, rng.randrange(20, 260), seed=seed)
        text, gap = answer_alone(cluster, prompt, path)
        if gap >= CLEAR_GAP:
            found[prompt] = text
        if len(found) == PROMPTS:
            return found
    raise AssertionError(f"only {len(found)} prompts have clear answers")


def answer_alone(
    cluster: Cluster, prompt: str, path: str, tokens: int = OUTPUT_TOKENS
) -> tuple[str, float]:
    """The text, and the smallest gap (nats) between a step's best token and its next."""
    body = {"max_tokens": tokens, "logprobs": True, "top_logprobs": 2, "pdctl_cache": False}
    choice = cluster.completion(prompt, path, **body).json()["choices"][0]
    steps = [sorted(t["logprob"] for t in s["top_logprobs"]) for s in choice["logprobs"]["content"]]
    assert all(len(step) == 2 for step in steps)
    return str(choice["text"]), min(step[1] - step[0] for step in steps)


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
    llama.wait("nothing in flight", llama.idle)
