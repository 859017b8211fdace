"""A client's body, checked before anything is scheduled. Pure.

What a *pair* cannot honour is asked of its engines' specs; ranges of sampling parameters are
the engine's own to judge, and its 4xx passes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from pdctl.engines.first_token import Constrains, unhonoured
from pdctl.runtime.router.endpoints import CHAT_COMPLETIONS
from pdctl.runtime.router.failure import RequestFailed, refused
from pdctl.runtime.router.policy import Path, shown
from pdctl.runtime.router.purpose import Purpose
from pdctl.topology.model import Role

MAX_BODY_BYTES = 8 << 20

OWNED = ("pdctl", "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Fields that only the router may set: they carry tickets and addresses."""

_BOOL = "a boolean"
_INT = "an integer"
_NUMBER = "a number"
_STRING = "a string"
_LIST = "an array"
_OBJECT = "an object"

_KINDS: dict[str, tuple[type, ...]] = {
    _BOOL: (bool,),
    _INT: (int,),
    _NUMBER: (int, float),
    _STRING: (str,),
    _LIST: (list,),
    _OBJECT: (dict,),
}

_TYPES = {
    "stream": _BOOL,
    "stream_options": _OBJECT,
    "n": _INT,
    "best_of": _INT,
    "max_tokens": _INT,
    "max_completion_tokens": _INT,
    "min_tokens": _INT,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "min_p": _NUMBER,
    "top_k": _INT,
    "top_logprobs": _INT,
    "seed": _INT,
    "logit_bias": _OBJECT,
    "response_format": _OBJECT,
    "tools": _LIST,
    "user": _STRING,
    "model": _STRING,
    "echo": _BOOL,
    "chat_template_kwargs": _OBJECT,
}

INSTEAD = {
    "suffix": "no engine here fills in before a suffix; put all of it into the prompt",
    "functions": 'write "tools": [{"type": "function", "function": {…}}]',
    "function_call": 'write "tool_choice"',
}
"""Fields that engines would take and ignore, and what to write."""

_LARGEST = (1 << 63) - 1
"""Of a whole number given where any number may stand: engines cast it to 64 bits."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One checked request. `body` has no null fields and names the model."""

    endpoint: str
    body: dict[str, Any]
    stream: bool
    prefill_fields: dict[str, Any] = {}
    """What the prefill leg's body has besides; a canary's."""
    keys: tuple[bytes, ...] = ()
    """Of its prompt's full pages, where the policy goes by them."""
    prompt_tokens: int | None = None
    """As its engines will count them; None where nothing had to read the prompt."""
    purpose: Purpose = Purpose.CLIENT


class Refuses(Constrains, Protocol):
    """What is used here of an engine's spec."""

    def refusals(self, body: dict[str, Any], role: Role) -> list[tuple[str, str]]: ...


def parse(raw: bytes) -> dict[str, Any]:
    """The body as an object; RequestFailed(400) for anything else."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise refused(
            f"the body is not valid JSON: {error}", param=None, code="invalid_json"
        ) from None
    if not isinstance(body, dict):
        raise refused("the body must be a JSON object", param=None, code="invalid_json")
    return body


def check(endpoint: str, raw: bytes, model: str) -> Ask:
    """Everything that can be said about a body without knowing its path.

    Raises:
        RequestFailed: 400 naming the parameter; 404 for a model that is not served here.
    """
    body = {name: value for name, value in parse(raw).items() if value is not None}
    for name in OWNED:
        if name in body:
            raise refused(f'"{name}" is set by the router alone', param=name)
    for name, instead in INSTEAD.items():
        if name in body:
            raise refused(
                f'"{name}" is not served: {instead}', param=name, code="unsupported_value"
            )
    _check_types(body)
    _check_model(body.setdefault("model", model), model)
    _check_one_answer(body)
    _check_stream_options(body)
    _check_logprobs(body.get("logprobs", False), chat=endpoint == CHAT_COMPLETIONS)
    if endpoint == CHAT_COMPLETIONS:
        _check_messages(body)
    else:
        body["prompt"] = _one_prompt(body)
    return Ask(endpoint=endpoint, body=body, stream=body.get("stream", False))


def _check_types(body: dict[str, Any]) -> None:
    for name, kind in _TYPES.items():
        if name not in body:
            continue
        value = body[name]
        right = isinstance(value, _KINDS[kind])
        if kind is not _BOOL and isinstance(value, bool):
            right = False
        if not right:
            raise refused(f'"{name}" must be {kind}', param=name, code="invalid_type")
        if kind is _NUMBER and isinstance(value, int) and abs(value) > _LARGEST:
            raise refused(f'"{name}" is out of range', param=name)
    for name in ("max_tokens", "max_completion_tokens"):
        if name in body and body[name] < 1:
            raise refused(f'"{name}" must be at least 1', param=name)
    _check_stop(body.get("stop"))
    if not all(isinstance(tool, dict) for tool in body.get("tools", [])):
        wanted = 'an array of {"type": "function", "function": {…}}'
        raise refused(f'"tools" must be {wanted}', param="tools", code="invalid_type")


def _check_stop(stop: object) -> None:
    strings = isinstance(stop, list) and all(isinstance(s, str) for s in stop)
    if stop is not None and not isinstance(stop, str) and not strings:
        raise refused(
            '"stop" must be a string or an array of strings', param="stop", code="invalid_type"
        )


def _check_logprobs(asked: object, *, chat: bool) -> None:
    """In completions' older form it is a whole number, in chats never."""
    if isinstance(asked, bool) or (isinstance(asked, int) and not chat):
        return
    wanted = 'a boolean; "top_logprobs" says how many' if chat else "a boolean or an integer"
    raise refused(f'"logprobs" must be {wanted}', param="logprobs", code="invalid_type")


def _check_model(asked: str, model: str) -> None:
    if asked != model:
        raise model_not_found(asked, model)


def model_not_found(asked: str, model: str) -> RequestFailed:
    return RequestFailed(
        404,
        f'the model "{shown(asked)}" does not exist; this cluster serves "{model}"',
        code="model_not_found",
        param="model",
    )


def _check_one_answer(body: dict[str, Any]) -> None:
    for name in ("n", "best_of"):
        if body.get(name, 1) != 1:
            raise refused(f'"{name}" must be 1', param=name, code="unsupported_value")


def _check_stream_options(body: dict[str, Any]) -> None:
    options = body.get("stream_options")
    if options is None:
        return
    if not body.get("stream", False):
        raise refused('"stream_options" needs "stream": true', param="stream_options")
    if not isinstance(options.get("include_usage", False), bool):
        raise refused(
            '"stream_options.include_usage" must be a boolean',
            param="stream_options",
            code="invalid_type",
        )


def _check_messages(body: dict[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refused('"messages" must be a non-empty array', param="messages")
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise refused(
                f'"messages[{at}]" must be an object', param="messages", code="invalid_type"
            )
        if not isinstance(message.get("role"), str):
            raise refused(f'"messages[{at}].role" must be a string', param="messages")
        _check_content(message.get("content"), at)
        _check_tool_calls(message.get("tool_calls"), at)


def _check_content(content: object, at: int) -> None:
    if content is None or isinstance(content, str):
        return
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if not parts:
        raise refused(
            f'"messages[{at}].content" must be a string or an array of parts',
            param="messages",
            code="invalid_type",
        )


def _check_tool_calls(calls: object, at: int) -> None:
    if calls is not None and not (isinstance(calls, list) and all(map(_is_tool_call, calls))):
        raise refused(
            f'"messages[{at}].tool_calls" must be an array of'
            ' {"type": "function", "function": {"name": "…", "arguments": "{…}"}}, the arguments'
            " a JSON object in a string",
            param="messages",
            code="invalid_type",
        )


def _is_tool_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    arguments = function.get("arguments")
    try:
        given = msgspec.json.decode(arguments) if isinstance(arguments, str) and arguments else {}
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False
    return isinstance(given, dict) and isinstance(arguments, str | dict | None)


def _one_prompt(body: dict[str, Any]) -> str | list[int]:
    """The prompt: a string or token ids. A batch of one is that one."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        if not prompt:
            raise refused('"prompt" must not be empty', param="prompt")
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise refused('"prompt" must be a string or a non-empty array of token ids', param="prompt")
    if all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        return prompt
    if all(isinstance(part, str | list) for part in prompt):
        raise refused(
            f'"prompt" holds {len(prompt)} prompts; send one per request',
            param="prompt",
            code="unsupported_value",
        )
    raise refused(
        '"prompt" must be a string or an array of token ids', param="prompt", code="invalid_type"
    )


def objections(
    body: dict[str, Any], path: Path, specs: Sequence[tuple[Refuses, Role]]
) -> RequestFailed | None:
    """What this path cannot honour, as a 400 naming parameter and path; None when all is
    fine. `specs`: each replica's engine spec, with the role it takes on this path."""
    found = [objection for spec, role in specs for objection in spec.refusals(body, role)]
    if len(specs) > 1:
        found += unhonoured(body, specs[0][0], specs[1][0])
    for parameter, reason in found:
        return refused(
            f'"{parameter}" cannot be honoured on {path.text}: {reason}',
            param=parameter,
            code="unsupported_value",
        )
    return None
