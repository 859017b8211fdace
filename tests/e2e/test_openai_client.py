"""The unmodified openai client against the router."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from e2e.cluster import Cluster

pytestmark = pytest.mark.engine

MESSAGES = [{"role": "user", "content": "Name a colour of the sky in one word, please."}]


@pytest.fixture
def client(llama: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{llama.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_lists_the_topologys_model(client: openai.OpenAI) -> None:
    """The id is the topology's, not a path on a host."""
    assert [m.id for m in client.models.list()] == ["tiny"]


def test_chat_streams_what_it_answers(client: openai.OpenAI) -> None:
    """Streaming and not give the same text, and usage counts alike."""
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, temperature=0
    )
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == (whole.choices[0].message.content or "")
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_stream_what_they_answer(client: openai.OpenAI) -> None:
    """The older route serves the same."""
    prompt = "Once upon a time a lantern"
    whole = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
    chunks = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=True
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    """The client raises its own NotFoundError and the message names the model that exists."""
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.chat.completions.create(model="other", messages=MESSAGES)


def test_a_refused_parameter_is_a_bad_request_that_names_it(client: openai.OpenAI) -> None:
    """R66: what no pair can honour is refused before anything is scheduled."""
    with pytest.raises(openai.BadRequestError, match="n"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, n=2)


def test_a_prompt_over_the_context_is_a_bad_request(client: openai.OpenAI, llama: Cluster) -> None:
    """U18: it is refused on both legs, and neither answers garbage."""
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="tiny", prompt="lantern " * 3000, max_tokens=4)
    assert llama.idle()


def test_text_response_format_is_accepted(client: openai.OpenAI) -> None:
    """R65: the default that clients send explicitly is not a refusal."""
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=2, response_format={"type": "text"}
    )
    assert answer.choices[0].finish_reason in ("length", "stop")
