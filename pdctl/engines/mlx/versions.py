"""Where mlx-lm 0.31.3 and 0.32 differ, and the seams of `mlx_lm` that are not public.

0.31.3 keeps stop strings, reasoning and tool markers in one state machine over tokens, run by
the batch; 0.32 matches stops over tokens in the batch and the rest over text in the handler.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx
import mlx_lm.server as library
import msgspec
from mlx_lm.generate import BatchGenerator

TEXT_STATES = "stop_sequences" in inspect.signature(BatchGenerator.insert_segments).parameters
"""True from 0.32: states are matched over text."""

Sampler = Callable[[mx.array], mx.array]


class Prompt(msgspec.Struct):
    """A tokenised prompt, cut where mlx-lm keeps prefixes (system prompt, thinking tail)."""

    tokens: list[int]
    segments: list[list[int]]
    segment_kinds: list[str]
    initial_state: str


def greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def _unchanged(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits


NO_PROCESSORS: list[Any] = [] if TEXT_STATES else [_unchanged]
"""0.31.3 misplaces the entries of a batch whose requests have no processor: give it one."""


def tokenize(responder: Any, tokenizer: Any, request: Any, args: Any) -> Prompt:
    """The library's own templates and segments; a prompt of token ids passes as it is.

    Raises:
        ValueError: the prompt is neither text nor token ids; and what a template raises.
    """
    if request.request_type == "text" and not isinstance(request.prompt, str):
        ids = request.prompt
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ValueError("prompt must be one string or one list of token ids")
        return Prompt(ids, [list(ids)], ["assistant"], "normal")
    tokens, segments, kinds, state = responder._tokenize(tokenizer, request, args)[:4]
    tokens = [int(token) for token in tokens]
    return Prompt(tokens, [list(s) for s in segments if len(s)], list(kinds), state)


def characters(request: Any) -> int:
    """Of a request's text, or of its messages; no template is applied."""
    if request.request_type == "text":
        return len(request.prompt) if isinstance(request.prompt, str) else 0
    contents = (message.get("content") for message in request.messages)
    texts = (part for content in contents for part in _texts(content))
    return sum(len(text) for text in texts)


def _texts(content: Any) -> Iterator[str]:
    """Of one message: a string, or the texts of its parts."""
    parts = content if isinstance(content, list) else [{"text": content}]
    for part in parts:
        text = part.get("text")
        if isinstance(text, str):
            yield text


def text(responder: Any, tokenizer: Any, request: Any, args: Any) -> str:
    """What `tokenize` would cut into tokens; "" where it can't be had alone."""
    if request.request_type == "text":
        return request.prompt if isinstance(request.prompt, str) else ""
    if not tokenizer.has_chat_template:
        return ""
    messages = [dict(m, content="".join(_texts(m.get("content")))) for m in request.messages]
    options = dict(responder.model_provider.cli_args.chat_template_args)
    options.update(args.chat_template_kwargs or {})
    options.update(tools=request.tools, tokenize=False, add_generation_prompt=True)
    return str(tokenizer.apply_chat_template(messages, **options))


def stop_rules(
    responder: Any, tokenizer: Any, stop_words: list[str], initial_state: str
) -> tuple[Any, Any]:
    """(what the batch matches, what the handler needs), cached by the library."""
    state = () if TEXT_STATES else (initial_state,)
    rules: tuple[Any, Any] = responder._make_state_machine(
        responder.model_provider.model_key, tokenizer, stop_words, *state
    )
    return rules


def context(tokenizer: Any, prompt: Prompt, rules: Any, stop: Callable[[], None]) -> Any:
    """The handler's view of one request; `stop` is called when it no longer reads."""
    matched = (
        {"text_sm": rules, "initial_state": prompt.initial_state}
        if TEXT_STATES
        else {"sequences": rules}
    )
    made = library.GenerationContext(
        has_tool_calling=tokenizer.has_tool_calling,
        has_thinking=tokenizer.has_thinking,
        tool_parser=tokenizer.tool_parser,
        prompt=prompt.tokens,
        prompt_cache_count=0,
        **matched,
    )
    made.stop = stop
    return made


def fresh(detokenizer: Any) -> Any:
    """One like it, for another answer. 0.31.3 makes its table of every token anew where the
    tokenizer is asked for one: 0.1 s, on the loop's thread, for each request."""
    made = copy.copy(detokenizer)
    made.reset()
    return made


def insert(
    generator: Any,
    segments: list[list[int]],
    *,
    cached: list[int],
    cache: list[Any],
    max_tokens: int,
    sampler: Sampler,
    processors: list[Any],
    stops: Any,
) -> int:
    """Puts one sequence into the batch; `cache` already holds `cached`. Returns its uid."""
    (uid,) = generator.insert_segments(
        segments=[segments],
        max_tokens=[max_tokens],
        caches=[cache],
        all_tokens=[cached],
        samplers=[sampler],
        logits_processors=[processors or NO_PROCESSORS],
        **{"stop_sequences" if TEXT_STATES else "state_machines": [stops]},
    )
    return int(uid)


def response(text: str, token: int, logprob: float, finish: str | None, top: Any, raw: Any) -> Any:
    """One token for the handler. `raw` is the batch's own response, None for a prefill leg."""
    states = (
        {}
        if TEXT_STATES
        else {
            "state": getattr(raw, "current_state", "normal"),
            "match": getattr(raw, "match_sequence", None),
        }
    )
    return library.Response(
        text=text, token=token, logprob=logprob, finish_reason=finish, top_tokens=top, **states
    )


def handler_stream(made: Any, responses: Iterable[Any]) -> Iterator[Any]:
    """What the handler iterates: 0.31.3 drops matched tokens here, 0.32 in the handler."""
    if TEXT_STATES:
        return iter(responses)
    filtered: Iterator[Any] = library._process_control_tokens(made, responses)
    return filtered


def keeps_stop_text(raw: Any) -> bool:
    """Whether the batch's last token belongs to the text that the handler gets."""
    return not TEXT_STATES or raw.finish_reason != "stop"


def prefilling(generator: Any) -> Iterator[tuple[int, int, int, list[Any]]]:
    """(uid, row, positions held, caches) of every prompt that has begun and not ended."""
    batch = generator._prompt_batch
    for row, uid in enumerate(batch.uids):
        yield uid, row, len(batch.tokens[row]), batch.prompt_cache


class First(msgspec.Struct):
    """What a prompt's last forward sampled, before the batch's next step reports it."""

    token: int
    logprobs: mx.array
    row: int
    caches: list[Any]
    finish_reason: str | None = None
    current_state: str | None = "normal"
    match_sequence: Any = None


def first_token(generator: Any, uid: int) -> First:
    """Right after the prompt's end; waits for its last forward."""
    batch = generator._generation_batch
    row = batch.uids.index(uid)
    token = int(batch._next_tokens[row].item())
    return First(token, batch._next_logprobs[row], row, batch.prompt_cache)


def matches_nothing(stops: Any, first: First) -> bool:
    """Whether a first token neither stops nor begins what might; then it can go out at once.
    For 0.31.3 this sets its state too."""
    if TEXT_STATES:
        return not stops.matcher().advance(first.token)
    _, first.match_sequence, first.current_state = stops.match(stops.make_state(), first.token)
    return first.match_sequence is None
