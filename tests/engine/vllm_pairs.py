"""Pairs of vLLM and MLX on the tiny Llama, and what is asked of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

import msgspec
from engines.replicas import WAIT_S, Pair, Process, text_of
from engines.vllm_replicas import MODEL_NAME
from tiny import digits

from pdctl.handoff.counters import Counters

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LENGTHS = (51, 64, 65, 66, 128, 129, 130, 193, 700)
"""Of prompts: under a page, at its end and beyond, over a chunk, over many pages."""
OUTPUT_TOKENS = 16
CHUNK_TOKENS = 128
BUFFER_PAGES = 40
"""Of vLLM's prefill replica: one context of 2048 tokens takes 32."""
BLOCKS = 34
"""Of 64 tokens on vLLM's decode replica: one context, so that others wait for it."""


class Four(msgspec.Struct):
    """Each engine in both roles: vLLM's vp0 and vd0, MLX's mp0 and md0."""

    vp: Process
    vd: Process
    mp: Process
    md: Process

    def pair(self, name: str) -> Pair:
        """Of "vllm>mlx" and its like."""
        prefill, decode = name.split(">")
        return Pair(
            self.vp if prefill == "vllm" else self.mp, self.vd if decode == "vllm" else self.md
        )


def completion(tokens: int, seed: int = 0, *, salt: str, **fields: Any) -> dict[str, Any]:
    """A prompt of that many tokens; prompts of different salts share no cached prefix."""
    return {
        "model": MODEL_NAME,
        "prompt": digits(tokens, seed),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "pdctl_cache": False,
        "cache_salt": salt,
        **fields,
    }


def chat(tokens: int, seed: int = 0, *, salt: str) -> dict[str, Any]:
    body = completion(tokens, seed, salt=salt)
    return {**body, "messages": [{"role": "user", "content": body.pop("prompt")}]}


def alone(process: Process, path: str, body: dict[str, Any]) -> str:
    """The text that one engine computes by itself, past every cache."""
    return text_of(answered_alone(process, path, body))


def answered_alone(process: Process, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Its whole answer."""
    status, answer = process.post(path, {**body, "cache_salt": "alone"})
    assert status == 200, answer
    assert len(text_of(answer)) > 8
    return answer


def until(process: Process, holds: Callable[[Counters], bool]) -> Counters:
    """Polls the counters, as the agent does, until they say so."""
    deadline = time.monotonic() + WAIT_S
    while not holds(found := process.counters()):
        assert time.monotonic() < deadline, found
    return found


def idle(counters: Counters) -> bool:
    held = (counters.handoffs_active, counters.requests_active, counters.buffer_bytes_used)
    return held == (0, 0, 0) and counters.waiters == 0


def kv_usage(process: Process) -> float:
    """The share of vLLM's blocks that some request holds."""
    return metric(process, "vllm:kv_cache_usage_perc")


def metric(process: Process, name: str) -> float:
    """One of vLLM's own metrics."""
    connection = HTTPConnection("127.0.0.1", process.http_port, timeout=WAIT_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    line = next(line for line in text.splitlines() if line.startswith(name))
    return float(line.rsplit(" ", 1)[1])


def check_at_rest(*processes: Process) -> None:
    """Nothing of any handoff is left, neither with us nor in vLLM's blocks."""
    for process in processes:
        until(process, idle)
        if process.spec.engine.value == "vllm":
            deadline = time.monotonic() + WAIT_S
            while (used := kv_usage(process)) > 0:
                assert time.monotonic() < deadline, used
