"""A prompt's token ids in the router, beside what transformers makes of the same request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from tiny import make_checkpoint
from transformers import AutoTokenizer

from pdctl.errors import UsageError
from pdctl.runtime.router.endpoints import CHAT_COMPLETIONS, COMPLETIONS
from pdctl.runtime.router.prompts import PromptReader

CHATS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "a < b && 'c'"},
    ],
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def reader(checkpoint: Path) -> PromptReader:
    return PromptReader(checkpoint)


@pytest.mark.parametrize("messages", CHATS)
def test_a_chat_is_read_through_the_template(
    reader: PromptReader, checkpoint: Path, messages: list[dict[str, Any]]
) -> None:
    """U24: the ids are those that engines compute: roles, markers and the generation prompt."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert reader.tokens(CHAT_COMPLETIONS, {"messages": messages}) == expected


def test_parts_of_text_are_one_text(reader: PromptReader) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    apart = {"messages": [{"role": "user", "content": parts}]}
    whole = {"messages": [{"role": "user", "content": "Hello"}]}
    assert reader.tokens(CHAT_COMPLETIONS, apart) == reader.tokens(CHAT_COMPLETIONS, whole)


def test_completions_are_text_or_ids(reader: PromptReader, checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert reader.tokens(COMPLETIONS, {"prompt": "one two"}) == tokenizer.encode("one two")
    assert reader.tokens(COMPLETIONS, {"prompt": [5, 6, 7]}) == [5, 6, 7]


def test_the_event_loop_is_not_where_it_is_read(reader: PromptReader) -> None:
    body = {"prompt": "one two"}
    assert anyio.run(reader.read, COMPLETIONS, body) == reader.tokens(COMPLETIONS, body)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{% for",
        "{{ messages + 1 }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_template_that_refuses_steers_nothing(tmp_path: Path, template: str) -> None:
    """The engine, which has the same template, says why."""
    made = make_checkpoint(tmp_path / "llama", "llama")
    (made / "chat_template.jinja").write_text(template)
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    assert PromptReader(made).tokens(CHAT_COMPLETIONS, body) is None


def test_template_arguments_and_tools_reach_the_template(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "llama", "llama")
    (made / "chat_template.jinja").write_text("{{ mood }} {{ tools | tojson }} {{ bos_token }}")
    reader = PromptReader(made)
    body = {
        "messages": [{"role": "user", "content": ""}],
        "tools": [{"type": "function", "function": {"name": "é"}}],
        "chat_template_kwargs": {"mood": "calm"},
    }
    text = 'calm [{"type": "function", "function": {"name": "é"}}] <|im_start|>'
    assert reader.tokens(CHAT_COMPLETIONS, body) == reader.tokens(COMPLETIONS, {"prompt": text})


def test_a_checkpoint_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(tmp_path)):
        PromptReader(tmp_path)
