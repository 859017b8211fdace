from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from pdctl.errors import UsageError
from pdctl.runtime.bench.prompts import PREFIX_TOKENS, PromptSource

CHECKPOINT = Path(os.environ.get("PDCTL_TEST_CHECKPOINT", "models/smollm2-135m-instruct"))


@pytest.fixture(scope="module")
def source(tokenizer: Tokenizer) -> PromptSource:
    return PromptSource(tokenizer, seed=0)


@given(tokens=st.integers(2, 600), key=st.uuids().map(str))
@settings(deadline=None, max_examples=60)
def test_a_prompt_encodes_to_exactly_the_tokens_asked_for(
    source: PromptSource, tokenizer: Tokenizer, tokens: int, key: str
) -> None:
    if tokens < 4:
        source = PromptSource(tokenizer, seed=0)
    prompt = source.prompt(tokens, key)
    assert prompt.tokens == tokens
    assert len(tokenizer.encode(prompt.text).ids) == tokens


@pytest.mark.skipif(
    not (CHECKPOINT / "tokenizer.json").is_file(), reason="no real checkpoint on this machine"
)
def test_a_real_tokenizer_gives_every_length_exactly() -> None:
    source = PromptSource.of_checkpoint(CHECKPOINT, seed=0)
    for tokens in (*range(2, 200), 600, 744, 2844):
        assert len(source.ids(source.prompt(tokens, "a").text)) == tokens


def test_no_two_prompts_share_their_first_tokens(source: PromptSource) -> None:
    texts = [source.prompt(51, f"lane/{lane}").text for lane in range(300)]
    prefixes = {tuple(source.ids(text)[:PREFIX_TOKENS]) for text in texts}
    assert len(prefixes) == 300


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others(
    tokenizer: Tokenizer,
) -> None:
    first, second, other = (
        [PromptSource(tokenizer, seed=seed).prompt(n, "k").text for n in (2, 51, 184)]
        for seed in (0, 0, 1)
    )
    assert first == second
    assert first != other


def test_the_special_token_that_the_engine_adds_counts(tokenizer: Tokenizer) -> None:
    prompt = PromptSource(tokenizer, seed=0).prompt(5, "k")
    assert len(tokenizer.encode(prompt.text, add_special_tokens=False).ids) == 4


def test_a_length_that_cannot_be_hit_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="exactly 1 tokens"):
        PromptSource(tokenizer, seed=0).prompt(1, "k")


def test_running_out_of_distinct_prefixes_is_an_error_not_a_reuse() -> None:
    three = Tokenizer(models.WordLevel({"aa": 0, "bb": 1, "cc": 2, "[UNK]": 3}, unk_token="[UNK]"))
    three.pre_tokenizer = pre_tokenizers.Whitespace()
    source = PromptSource(three, seed=0)
    assert len({source.prompt(1, str(number)).text for number in range(3)}) == 3
    with pytest.raises(UsageError, match="no prompt of 1 tokens is left"):
        source.prompt(1, "one more")


def test_a_missing_tokenizer_is_a_usage_error_that_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        PromptSource.of_checkpoint(tmp_path, seed=0)
    assert "--tokenizer" in (caught.value.hint or "")
