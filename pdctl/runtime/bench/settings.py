"""What a sweep was asked to do. Checked in full before the first request."""

from __future__ import annotations

import msgspec

from pdctl.errors import UsageError

MIN_INPUT_TOKENS = 2
"""One position is imported and the last one recomputed: a shorter prompt has no handoff."""

MAX_CONCURRENCY = 1024

DEFAULT_INPUT_LENS = "51,184,744,2844"
EXAMPLES = {"--input-lens": "51,184,744", "--concurrency": "1,4"}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    input_lens: tuple[int, ...]
    """Prompt tokens, special tokens included."""
    output_len: int = 32
    concurrency: tuple[int, ...] = (1,)
    num_prompts: int = 5
    """Rounds per cell; each sends `concurrency` requests at once."""
    num_warmups: int = 2
    seed: int = 0
    goodput: dict[str, float] = {}
    """Milliseconds by metric; see `goodput.objectives`."""


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """ "51,184" as (51, 184), in the order given; UsageError names the option otherwise."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise UsageError(
            f"{option} must be whole numbers with commas between them, not {text!r}",
            hint=f"for example {option} {EXAMPLES.get(option, '1,2')}",
        )
    numbers = tuple(int(part) for part in parts)
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{option} names a number twice: {text}")
    return numbers


def default_input_lens(context_length: int, output_len: int) -> tuple[int, ...]:
    """Of the default lengths those that this context holds; all of them where it holds none,
    for `check` to refuse."""
    usual = whole_numbers(DEFAULT_INPUT_LENS, "--input-lens")
    return tuple(n for n in usual if n + output_len <= context_length) or usual


def check(settings: Settings, context_length: int) -> None:
    """Raises UsageError for the first value that cannot be run against this context."""
    for name, least in (("output_len", 1), ("num_prompts", 1), ("num_warmups", 0)):
        value = getattr(settings, name)
        if value < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    for lanes in settings.concurrency:
        if not 1 <= lanes <= MAX_CONCURRENCY:
            raise UsageError(f"--concurrency must lie in 1..{MAX_CONCURRENCY}, not {lanes}")
    for tokens in settings.input_lens:
        if tokens < MIN_INPUT_TOKENS:
            raise UsageError(
                f"--input-lens {tokens} is too short: under {MIN_INPUT_TOKENS} tokens nothing "
                "is handed over"
            )
        if tokens + settings.output_len > context_length:
            raise UsageError(
                f"--input-lens {tokens} with --output-len {settings.output_len} is beyond the "
                f"context of {context_length} tokens",
                hint=f"the longest prompt that fits has {context_length - settings.output_len} "
                "tokens",
            )
