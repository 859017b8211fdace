"""Prompt lengths without a tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.runtime.cost.lengths import TRIAL, Lengths, bytes_of


def chat(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@given(st.floats(0.1, 2.0), st.integers(0, 60), st.integers(200, 50_000))
def test_a_line_is_learnt_from_two_answers(ratio: float, template: int, size: int) -> None:
    """A chat's template adds the same tokens to every prompt."""
    lengths = Lengths()
    for known in (100, 1000, 10_000):
        lengths.learn(chat("a" * known), round(template + ratio * known))
    expected = template + ratio * size
    assert lengths.tokens(chat("a" * size)) == pytest.approx(expected, rel=0.06, abs=3)


def test_token_ids_are_counted() -> None:
    assert Lengths().tokens({"prompt": [1, 2, 3]}) == 3


def test_bytes_are_of_everything_that_becomes_prompt() -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "é"}]
    body = {**chat(parts), "tools": [{"function": {"name": "f"}}], "user": "not this"}
    assert bytes_of(body) == len("user") + 2 * len("text") + 2 + 2 + 1


def test_trials_count_until_clients_texts_do() -> None:
    """A trial's words are not a client's: one answer of a client's own outweighs them."""
    lengths = Lengths()
    lengths.learn({"prompt": "a" * 1000}, 250, TRIAL)
    assert lengths.tokens({"prompt": "a" * 400}) == 100
    lengths.learn({"prompt": "7" * 1000}, 1000)
    assert lengths.tokens({"prompt": "7" * 400}) == 400


@given(st.text(max_size=200))
def test_a_length_is_at_least_one(text: str) -> None:
    assert Lengths().tokens({"prompt": text}) >= 1


def test_what_was_learnt_is_stored_and_taken_again() -> None:
    lengths = Lengths()
    lengths.learn({"prompt": "a" * 1000}, 500)
    assert Lengths(lengths.known).tokens({"prompt": "a" * 100}) == 50
