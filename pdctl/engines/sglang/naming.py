"""Log probabilities by token id. SGLang's completions name tokens by text alone, and two tokens
may have one text; a completion that asks for `return_token_ids` has its tokens named
`token_id:N` instead, as vLLM does. The canary compares engines by these ids.

Called in the HTTP server's process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Ranked = tuple[float, int, str | None]
"""SGLang's (log probability, id, text); without texts where they were not asked for."""

TOKENS = ("input_token_logprobs", "output_token_logprobs")
TOPS = ("input_top_logprobs", "output_top_logprobs")


def without_texts(converted: Any, serving: Any, request: Any, *_: Any, **__: Any) -> None:
    """After SGLang has made its own request of a completion."""
    if request.return_token_ids:
        converted[0].return_text_in_logprobs = False


def named_by_id(original: Callable[..., Any], *arguments: Any, **given: Any) -> Any:
    """Around what writes log probabilities as OpenAI does."""
    tokens = given.get("output_token_logprobs")
    if not tokens or tokens[0][2] is not None:
        return original(*arguments, **given)
    for name in TOKENS:
        if given.get(name) is not None:
            given[name] = _named(given[name])
    for name in TOPS:
        if given.get(name) is not None:
            given[name] = [None if top is None else _named(top) for top in given[name]]
    return original(*arguments, **{**given, "tokenizer": None})


def _named(tokens: Sequence[Ranked]) -> list[Ranked]:
    return [(logprob, token, f"token_id:{token}") for logprob, token, _ in tokens]
