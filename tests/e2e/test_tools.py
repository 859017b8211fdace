"""Tool calls through a pair, with the unmodified openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from e2e.cluster import Cluster
from scripted import make_scripted

pytestmark = pytest.mark.engine

CALL = ("<tool_call>", '{"name": "weather", ', '"arguments": {"city": "Paris"}}', "</tool_call>")
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = make_scripted(tmp_path_factory.mktemp("scripted") / "model", CALL)
    with Cluster(tmp_path_factory.mktemp("tools"), model) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{cluster.url}/v1",
        api_key="none",
        max_retries=0,
        default_headers={"x-pdctl-path": "p0>d0"},
    ) as client:
        yield client


def test_a_tool_call_comes_as_one(client: openai.OpenAI, cluster: Cluster) -> None:
    """Both legs render the tools into their prompts, and decode's engine parses the call."""
    before = cluster.pair()["imported_tokens"]
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, max_tokens=20, temperature=0
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 60
    assert cluster.pair()["imported_tokens"] - before == answer.usage.prompt_tokens - 1


def test_a_streamed_tool_call_is_the_same(client: openai.OpenAI) -> None:
    """Deltas put together give the call of the plain answer."""
    chunks = client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, max_tokens=20, temperature=0, stream=True
    )
    name, arguments, reasons = "", "", set()
    for chunk in chunks:
        for choice in chunk.choices:
            reasons.add(choice.finish_reason)
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    assert name == "weather"
    assert json.loads(arguments) == {"city": "Paris"}
    assert "tool_calls" in reasons


def test_the_conversation_goes_on_with_the_tools_answer(client: openai.OpenAI) -> None:
    """An assistant's call and its tool's answer are messages like others."""
    first = client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, max_tokens=20, temperature=0
    )
    call = (first.choices[0].message.tool_calls or [])[0]
    messages = [
        *ASK,
        first.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    second = client.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, max_tokens=20, temperature=0
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_a_choice_of_tools_is_kept_or_refused(client: openai.OpenAI) -> None:
    """R66: "none" keeps the tools out of the prompt; a forced call is refused by name."""
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 2}
    plain = client.chat.completions.create(**asked)
    none = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="none")
    assert plain.usage is not None
    assert none.usage is not None
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match='"tool_choice" cannot be honoured'):
        client.chat.completions.create(**asked, tools=TOOLS, tool_choice="required")
