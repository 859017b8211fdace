"""A text's least number of tokens never exceeds the real one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import digits, make_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pdctl.engines.mlx.shortest import Shortest


def wrapped(tokenizer: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return wrapped(make_tokenizer())


@given(st.text() | st.text("ab é\n\U0001f600", max_size=400))
def test_no_text_has_fewer_tokens(tiny: Any, text: str) -> None:
    """Whatever is dropped, merged or swallowed."""
    assert Shortest(tiny).tokens(text) <= len(tiny.encode(text))


def test_a_long_text_is_known_to_be_long(tiny: Any) -> None:
    """U18: what is far over a context need not be tokenised to be refused."""
    assert Shortest(tiny).tokens(digits(500_000)) > 8192


def test_of_a_tokeniser_that_swallows_words_nothing_is_known() -> None:
    """One unknown word of any length is one token there."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert Shortest(wrapped(words)).tokens("b" * 100_000) == 0
