"""A body is checked before anything is scheduled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdctl.runtime.router.endpoints import CHAT_COMPLETIONS, COMPLETIONS
from pdctl.runtime.router.failure import RequestFailed
from pdctl.runtime.router.policy import Path
from pdctl.runtime.router.request import check, objections
from pdctl.topology.model import Role

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def called(**function: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}", **function}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def checked(endpoint: str, body: Any) -> dict[str, Any]:
    return check(endpoint, json.dumps(body).encode(), "m").body


@pytest.mark.parametrize(
    ("endpoint", "extra", "param"),
    [
        (CHAT_COMPLETIONS, {"n": 2}, "n"),
        (CHAT_COMPLETIONS, {"n": 0}, "n"),
        (CHAT_COMPLETIONS, {"n": True}, "n"),
        (COMPLETIONS, {"best_of": 3}, "best_of"),
        (CHAT_COMPLETIONS, {"stream": "yes"}, "stream"),
        (CHAT_COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT_COMPLETIONS, {"stream": True, "stream_options": []}, "stream_options"),
        (
            CHAT_COMPLETIONS,
            {"stream": True, "stream_options": {"include_usage": "x"}},
            "stream_options",
        ),
        (CHAT_COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (CHAT_COMPLETIONS, {"max_tokens": 1.5}, "max_tokens"),
        (CHAT_COMPLETIONS, {"max_completion_tokens": -1}, "max_completion_tokens"),
        (CHAT_COMPLETIONS, {"temperature": "hot"}, "temperature"),
        (CHAT_COMPLETIONS, {"temperature": 10**30}, "temperature"),
        (CHAT_COMPLETIONS, {"repetition_penalty": -(10**30)}, "repetition_penalty"),
        (CHAT_COMPLETIONS, {"min_p": "low"}, "min_p"),
        (CHAT_COMPLETIONS, {"top_k": 1.5}, "top_k"),
        (CHAT_COMPLETIONS, {"top_logprobs": True}, "top_logprobs"),
        (CHAT_COMPLETIONS, {"chat_template_kwargs": 5}, "chat_template_kwargs"),
        (CHAT_COMPLETIONS, {"stop": [1]}, "stop"),
        (CHAT_COMPLETIONS, {"messages": []}, "messages"),
        (CHAT_COMPLETIONS, {"messages": "hi"}, "messages"),
        (CHAT_COMPLETIONS, {"messages": ["hi"]}, "messages"),
        (CHAT_COMPLETIONS, {"messages": [{"content": "hi"}]}, "messages"),
        (CHAT_COMPLETIONS, {"messages": [{"role": "user", "content": 3}]}, "messages"),
        (CHAT_COMPLETIONS, {"response_format": "json"}, "response_format"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [2]]}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (CHAT_COMPLETIONS, {"messages": [{"role": "user", "tool_calls": 5}]}, "messages"),
        (CHAT_COMPLETIONS, {"messages": [{"role": "user", "tool_calls": [5]}]}, "messages"),
        (CHAT_COMPLETIONS, {"messages": [{"role": "user", "tool_calls": [{}]}]}, "messages"),
        (CHAT_COMPLETIONS, {"messages": [called(arguments="{bad")]}, "messages"),
        (CHAT_COMPLETIONS, {"messages": [called(arguments=5)]}, "messages"),
        (CHAT_COMPLETIONS, {"messages": [called(name=5)]}, "messages"),
        (CHAT_COMPLETIONS, {"functions": []}, "functions"),
        (CHAT_COMPLETIONS, {"tools": [1]}, "tools"),
        (CHAT_COMPLETIONS, {"function_call": "auto"}, "function_call"),
        (CHAT_COMPLETIONS, {"logprobs": 2}, "logprobs"),
        (COMPLETIONS, {"logprobs": "2"}, "logprobs"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"pdctl": {"room": 1}}, "pdctl"),
        (COMPLETIONS, {"kv_transfer_params": {}}, "kv_transfer_params"),
    ],
)
def test_what_cannot_be_served_is_a_400_that_names_its_parameter(
    endpoint: str, extra: dict, param: str
) -> None:
    """R66: n over 1, batches and wrong types are refused by name; forged legs too."""
    body = {**(CHAT if endpoint == CHAT_COMPLETIONS else TEXT), **extra}
    with pytest.raises(RequestFailed) as caught:
        checked(endpoint, body)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert f'"{param}' in caught.value.message


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"a": "\xff"}', b"[" * 9999, b'{"a": NaN}']
)
def test_a_body_that_is_no_json_object_is_a_400(raw: bytes) -> None:
    """Bad JSON, other types, invalid UTF-8 and absurd nesting."""
    with pytest.raises(RequestFailed) as caught:
        check(CHAT_COMPLETIONS, raw, "m")
    assert caught.value.status == 400


def test_another_model_is_a_404_like_openais() -> None:
    with pytest.raises(RequestFailed) as caught:
        checked(CHAT_COMPLETIONS, {**CHAT, "model": "gpt-4"})
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    assert '"gpt-4" does not exist' in caught.value.message


def test_nulls_are_absent_and_the_model_is_filled_in() -> None:
    """Clients send null for what they do not set; engines refuse it."""
    body = checked(CHAT_COMPLETIONS, {**CHAT, "model": None, "temperature": None, "stop": None})
    assert body == CHAT


@pytest.mark.parametrize("prompt", ["hi", [1, 2, 3]])
def test_one_prompt_passes_and_a_batch_of_one_is_that_one(prompt: object) -> None:
    assert checked(COMPLETIONS, {**TEXT, "prompt": prompt})["prompt"] == prompt
    assert checked(COMPLETIONS, {**TEXT, "prompt": [prompt]})["prompt"] == prompt


def test_a_call_of_a_tool_and_logprobs_of_either_kind_pass() -> None:
    """As the openai client sends them."""
    told = {**CHAT, "messages": [called(), called(arguments='{"a": 1}'), called(arguments="")]}
    assert checked(CHAT_COMPLETIONS, told) == told
    for asked in (True, 2):
        assert checked(COMPLETIONS, {**TEXT, "logprobs": asked})["logprobs"] is asked


def test_response_format_text_is_fine() -> None:
    """R65."""
    format_ = {"type": "text"}
    assert checked(CHAT_COMPLETIONS, {**CHAT, "response_format": format_})["response_format"]


class Picky:
    def __init__(
        self, role: Role, constraints: frozenset[str] = frozenset(), *, recomputes: bool = True
    ) -> None:
        self.role = role
        self.constraints = constraints
        self.recomputes_last_token = recomputes

    def refusals(self, body: dict[str, Any], role: Role) -> list[tuple[str, str]]:
        return [("seed", "its first token is P's")] if role is self.role else []


def test_what_a_pair_cannot_honour_names_parameter_and_pair() -> None:
    """R66: the engine's reason, the parameter and the path."""
    path = Path("p0", "d0")
    specs = [(Picky(Role.DECODE), Role.PREFILL), (Picky(Role.DECODE), Role.DECODE)]
    failure = objections({}, path, specs)
    assert failure is not None
    assert failure.param == "seed"
    assert "p0>d0" in failure.message
    assert objections({}, path, specs[:1]) is None


GRAMMARS = frozenset({"regex", "response_format", "tool_choice"})


@pytest.mark.parametrize(
    "body",
    [
        {"regex": "[a-z]+"},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    ],
)
def test_a_constraint_that_prefill_does_not_put_on_the_first_token_is_refused(body: dict) -> None:
    """R66: where decode takes that token. Where it samples it itself, or prefill applies the
    same constraints, it is fine."""
    path = Path("p0", "d0")
    taker = (Picky(Role.BOTH, GRAMMARS, recomputes=False), Role.DECODE)
    without, alike = Picky(Role.BOTH), Picky(Role.BOTH, GRAMMARS)
    failure = objections(body, path, [(without, Role.PREFILL), taker])
    assert failure is not None
    assert failure.param in body
    assert "first token" in failure.message
    assert objections(body, path, [(alike, Role.PREFILL), taker]) is None
    assert objections(body, path, [(without, Role.PREFILL), (alike, Role.DECODE)]) is None


@pytest.mark.parametrize(
    "body", [{"response_format": {"type": "text"}}, {"tool_choice": "auto"}, {"regex": ""}]
)
def test_what_constrains_nothing_is_fine_on_every_pair(body: dict) -> None:
    """R65."""
    taker = (Picky(Role.BOTH, GRAMMARS, recomputes=False), Role.DECODE)
    specs = [(Picky(Role.BOTH), Role.PREFILL), taker]
    assert objections(body, Path("p0", "d0"), specs) is None
