"""Tokens are named by id where a completion asks for ids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pdctl.engines.sglang.naming import named_by_id, without_texts

NAMELESS = [(-0.1, 7, None), (-0.2, 9, None)]
NAMED = [(-0.1, "token_id:7"), (-0.2, "token_id:9")]


def as_openai(**given: Any) -> dict[str, Any]:
    """SGLang's function as far as it matters: text and number of each token."""
    tops = given.get("output_top_logprobs") or []
    return {
        "tokens": [(number, text) for number, _, text in given["output_token_logprobs"]],
        "tops": [top and [(number, text) for number, _, text in top] for top in tops],
        "tokenizer": given["tokenizer"],
    }


def test_texts_are_left_out_where_ids_are_asked_for() -> None:
    for asked in (True, False):
        made = SimpleNamespace(return_text_in_logprobs=True)
        without_texts((made, None), None, SimpleNamespace(return_token_ids=asked))
        assert made.return_text_in_logprobs is not asked


def test_tokens_without_texts_are_named_by_id() -> None:
    """SGLang would make every one of them the empty text, and so one of all."""
    tops = [NAMELESS, None]
    given = {"output_token_logprobs": NAMELESS, "output_top_logprobs": tops, "tokenizer": object()}
    assert named_by_id(as_openai, **given) == {
        "tokens": NAMED,
        "tops": [NAMED, None],
        "tokenizer": None,
    }


def test_tokens_with_texts_are_as_sglang_made_them() -> None:
    tokens = [(-0.1, 7, " a")]
    given = {"output_token_logprobs": tokens, "tokenizer": "t"}
    found = named_by_id(as_openai, **given)
    assert found == {"tokens": [(-0.1, " a")], "tops": [], "tokenizer": "t"}
