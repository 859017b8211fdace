"""The unmodified `openai` client against the router."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
from runtime.router.cluster import MODEL, Cluster, cluster, eventually
from runtime.router.fakes import TEXT, chunk_of, fails, says, streams

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(c: Cluster, key: str = "x") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=c.url("/v1"), api_key=key, max_retries=0, timeout=10
    ) as client:
        yield client


async def test_chat_and_completions_whole_and_streamed() -> None:
    async with cluster("p0 d0") as c, client_of(c) as client:
        chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert chat.choices[0].message.content == "".join(TEXT)
        assert chat.usage.total_tokens == 12
        text = await client.completions.create(model=MODEL, prompt="hi")
        assert text.choices[0].text == "".join(TEXT)
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        said = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(said) == "".join(TEXT)
        assert chunks[-1].usage.total_tokens == 12
        stream = await client.completions.create(model=MODEL, prompt="hi", stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == "".join(TEXT)


async def test_models_are_listed() -> None:
    async with cluster("o0") as c, client_of(c) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_errors_arrive_as_the_clients_own_classes() -> None:
    async with cluster("p0 d0", api_key="k") as c:
        async with client_of(c, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        async with client_of(c, "k") as client:
            ask = client.chat.completions.create
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await ask(model="gpt-4", messages=MESSAGES)
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(model=MODEL, messages=MESSAGES, n=2)
            assert caught.value.param == "n"
            c["p0"].on["prefill"] = says(
                400, json.dumps({"error": {"message": "too long", "code": "context"}}).encode()
            )
            with pytest.raises(openai.BadRequestError, match="too long"):
                await ask(model=MODEL, messages=MESSAGES)
            c["p0"].on["prefill"] = fails(502, "lost", "protocol")
            with pytest.raises(openai.InternalServerError) as failed:
                await ask(model=MODEL, messages=MESSAGES)
            assert failed.value.status_code == 502
            assert failed.value.code == "protocol"
            assert 'prefill replica "p0"' in failed.value.message


async def test_a_stream_that_breaks_raises_and_keeps_what_came() -> None:
    """R63: the client's iterator raises APIError with our message; it never just ends."""
    async with cluster("p0 d0") as c, client_of(c) as client:
        c["d0"].on["decode"] = streams(chunk_of({"model": MODEL, "messages": []}, "Hel"), cut=True)
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        chunks = aiter(stream)
        assert (await anext(chunks)).choices[0].delta.content == "Hel"
        with pytest.raises(openai.APIError, match='decode replica "d0"'):
            await anext(chunks)


async def test_a_stream_that_is_left_ends_on_the_engines() -> None:
    """U34: the client stops reading and closes."""
    async with cluster("p0 d0") as c, client_of(c) as client:
        c["d0"].on["decode"] = streams(chunk_of({"model": MODEL, "messages": []}, "a"), hang=True)
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await eventually(lambda: c["d0"].open == 0 and len(c["d0"].aborted) == 1)
