"""The unmodified openai client against the router."""

from __future__ import annotations

import time
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


def test_logprobs_of_the_older_form(client: openai.OpenAI) -> None:
    """`logprobs=2`: texts, the chosen ones' and two alternatives' values, offsets; streamed too."""
    asked = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    choice = client.completions.create(**asked, logprobs=2).choices[0]
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert "".join(found.tokens).startswith(choice.text)
    assert found.text_offset is not None
    assert found.text_offset[:2] == [0, len(found.tokens[0])]
    assert found.top_logprobs is not None
    assert found.token_logprobs is not None
    for text, value, tops in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert tops[text] == value == max(tops.values())
    events = [
        e.choices[0].logprobs for e in client.completions.create(**asked, logprobs=2, stream=True)
    ]
    assert [t for e in events if e for t in e.tokens or ()] == found.tokens
    assert [o for e in events if e for o in e.text_offset or ()] == found.text_offset
    bare = client.completions.create(**asked, logprobs=0).choices[0].logprobs
    assert bare is not None
    assert bare.token_logprobs == found.token_logprobs
    assert bare.top_logprobs is None
    with pytest.raises(openai.BadRequestError, match="0 to 5"):
        client.completions.create(**asked, logprobs=6)


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    """The entry is the chosen token's, its likeliest alternative stands first; streamed too."""
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    asked |= {"logprobs": True, "top_logprobs": 3}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content
    assert entries
    for entry in entries:
        assert (entry.token, entry.logprob) == (
            entry.top_logprobs[0].token,
            entry.top_logprobs[0].logprob,
        )
        assert len(entry.top_logprobs) == 3
    events = [e.choices[0].logprobs for e in client.chat.completions.create(**asked, stream=True)]
    assert [one for e in events if e for one in e.content or ()] == entries


def test_a_prompt_far_over_the_context_is_refused_at_once(client: openai.OpenAI) -> None:
    """U18: 5 MB in less time than it would take to tokenise them."""
    text = "12345 " * 900_000
    began_s = time.monotonic()
    with pytest.raises(openai.BadRequestError, match="the context holds"):
        client.completions.create(model="tiny", prompt=text, max_tokens=4)
    with pytest.raises(openai.BadRequestError, match="the context holds"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}])
    assert time.monotonic() - began_s < 10


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
    llama.wait("nothing in flight", llama.idle)


def test_text_response_format_is_accepted(client: openai.OpenAI) -> None:
    """R65: the default that clients send explicitly is not a refusal."""
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=2, response_format={"type": "text"}
    )
    assert answer.choices[0].finish_reason in ("length", "stop")
