"""The router over real MLX replicas of a tiny checkpoint: one prefill, one decode, one
ordinary. One test, so that the replicas start once."""

from __future__ import annotations

import json
import time
from typing import Any

import anyio
import openai
import pytest
import tiny
from runtime.router.cluster import MODEL
from runtime.router.engines import RealCluster, real_cluster

pytest.importorskip("mlx_lm")

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.slow]

CONTENT = "Tell me " + tiny.digits(90)
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": CONTENT}],
    "max_tokens": 8,
    "temperature": 0.0,
}
COMPLETION = {"model": MODEL, "prompt": CONTENT, "max_tokens": 8, "temperature": 0.0}


async def answered(
    c: RealCluster, path: str, body: dict[str, Any], pin: str
) -> tuple[int, bytes, Any]:
    async with c.http.post(c.url(path), json=body, headers={"x-pdctl-path": pin}) as response:
        return response.status, await response.read(), response.headers


def text_of(raw: bytes) -> str:
    choice = json.loads(raw)["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def streamed_text(raw: bytes) -> str:
    said = []
    for event in raw.split(b"\n\n"):
        payload = event.removeprefix(b"data: ")
        if event.startswith(b"data: ") and payload != b"[DONE]":
            said += [
                choice.get("text") or choice.get("delta", {}).get("content") or ""
                for choice in json.loads(payload)["choices"]
            ]
    return "".join(said)


async def texts_are_equal(c: RealCluster) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        status, alone, _ = await answered(c, path, body, "o0")
        assert status == 200, alone
        before = (await c.counters())["d0"].imported_tokens
        status, handed, headers = await answered(c, path, body, "p0>d0")
        assert status == 200, handed
        assert headers["x-pdctl-path"] == "p0>d0"
        assert text_of(handed) == text_of(alone)
        prompt_tokens = json.loads(handed)["usage"]["prompt_tokens"]
        after = (await c.counters())["d0"].imported_tokens
        assert after - before == prompt_tokens - 1
        for pin in ("o0", "p0>d0"):
            status, raw, _ = await answered(c, path, {**body, "stream": True}, pin)
            assert status == 200
            assert streamed_text(raw) == text_of(alone)


async def mistakes_are_4xx(c: RealCluster) -> None:
    long = {**COMPLETION, "prompt": tiny.digits(3000)}
    one = {**COMPLETION, "prompt": "1"}
    for pin in ("p0>d0", "o0"):
        for body in (long, {**COMPLETION, "temperature": -1}, {**COMPLETION, "top_p": 7}):
            status, raw, _ = await answered(c, "/v1/completions", body, pin)
            assert 400 <= status < 500, (pin, status, raw)
            assert json.loads(raw)["error"]["message"]
        status, raw, _ = await answered(c, "/v1/completions", one, pin)
        assert status in (200, 400), (pin, status, raw)
        assert (await answered(c, "/v1/completions", COMPLETION, pin))[0] == 200


async def the_openai_client_works(c: RealCluster) -> None:
    async with openai.AsyncOpenAI(
        base_url=c.url("/v1"), api_key="x", max_retries=0, timeout=60
    ) as client:
        whole = await client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
        assert whole.usage.prompt_tokens > 90
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
        stream = await client.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens > 0
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(**{**CHAT, "model": "x"})


async def nothing_is_left(c: RealCluster) -> None:
    counters = await c.counters()
    for found in counters.values():
        assert found.handoffs_active == 0
        assert found.buffer_bytes_used == 0


async def a_killed_replica_is_named(c: RealCluster) -> None:
    """R61: SIGKILL of decode while it streams: an error event that names it, in 5 s."""
    body = {**CHAT, "max_tokens": 1500, "stream": True}
    with anyio.fail_after(20):
        async with c.http.post(
            c.url("/v1/chat/completions"), json=body, headers={"x-pdctl-path": "p0>d0"}
        ) as response:
            assert response.status == 200
            await response.content.readuntil(b"\n\n")
            c.processes["d0"].kill()
            with anyio.fail_after(5):
                raw = await response.read()
        assert b'decode replica \\"d0\\"' in raw.split(b"\n\n")[-2]
        status, raw, _ = await answered(c, "/v1/chat/completions", CHAT, "p0>d0")
    assert status in (502, 503)
    assert b"d0" in raw


async def test_requests_through_real_replicas() -> None:
    """R68, R24, U18, R27: equal text on both paths, whole and streamed; n-1 tokens imported;
    mistakes are 4xx and change nothing; nothing is left; a killed replica is named."""
    async with real_cluster("p0 d0 o0") as c:
        await texts_are_equal(c)
        await mistakes_are_4xx(c)
        await the_openai_client_works(c)
        await nothing_is_left(c)
        await a_killed_replica_is_named(c)


async def test_a_long_answer_that_is_not_streamed_outlives_the_deadline() -> None:
    """R5: nothing of it leaves the decode engine before its end, which tells of its tokens."""
    timeout_s = 1.0
    async with real_cluster("p0 d0", timeout_s=timeout_s) as c:
        body = {**COMPLETION, "max_tokens": 1500}
        began_s = time.monotonic()
        status, raw, _ = await answered(c, "/v1/completions", body, "p0>d0")
        took_s = time.monotonic() - began_s
        assert status == 200, raw
        assert json.loads(raw)["usage"]["completion_tokens"] == 1500
        assert took_s > 2 * timeout_s
