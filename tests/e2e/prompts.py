"""Prompts of an exact number of tokens, none a prefix of another."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

WORDS = (
    "harbour lantern violin copper meadow winter signal orchard marble river engine silver "
    "garden thunder paper castle desert candle forest bridge window summer island mirror"
).split()


def exact_prompt(model_dir: Path, tokens: int, seed: int) -> str:
    """Text that the checkpoint's tokenizer encodes to exactly `tokens` ids.

    Raises:
        ValueError: no such text was found; the tokenizer merges every filler.
    """
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    rng = random.Random(seed * 1000 + tokens)
    text = f"{seed}"
    while count(tokenizer, text) < tokens:
        longer = f"{text} {rng.choice(WORDS)}"
        text = longer if count(tokenizer, longer) <= tokens else f"{text} a"
        if count(tokenizer, text) > tokens:
            raise ValueError(f"no text of {tokens} tokens")
    return text


def count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text).ids)
