"""Prompts of exactly n tokens, with early prefixes that no two of them share."""

from __future__ import annotations

import random
import re
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from pdctl.errors import UsageError

PREFIX_TOKENS = 8
"""Two prompts of one run differ within this many tokens (within all, where shorter)."""

_POOL = 4096
_DRAWS = 32
_CORRECTIONS = 8
_MARKED_WORD = re.compile(r"[Ġ▁]([a-z]{2,})")
_BARE_WORD = re.compile(r"[a-z]{2,}")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    tokens: int
    """Counted by encoding `text`, special tokens included."""


class PromptSource:
    """Draws prompts from one tokenizer's own words.

    Deterministic: the same seed, length and key give the same text, as long as the same
    prompts were drawn before (a prefix that was used already is drawn again). One thread.
    """

    def __init__(self, tokenizer: Tokenizer, *, seed: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._seed = seed
        self._used: set[tuple[int, ...]] = set()
        self._pool = _single_token_pieces(tokenizer, random.Random(f"{seed}/pool"))

    @classmethod
    def of_checkpoint(cls, directory: Path, *, seed: int) -> PromptSource:
        """Reads `tokenizer.json` there; UsageError where it is missing or unreadable."""
        path = directory / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_buffer(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot read the tokenizer {path}: {error}",
                hint="name a checkpoint on this machine with --tokenizer DIR",
            ) from error
        return cls(tokenizer, seed=seed)

    def prompt(self, tokens: int, key: str) -> Prompt:
        """A prompt of exactly `tokens` tokens; `key` names its place in the run.

        Raises UsageError, naming the length, where the tokenizer cannot hit it or every
        prefix of that length was used.
        """
        rng = random.Random(f"{self._seed}/{tokens}/{key}")
        hit = False
        for _ in range(_DRAWS):
            found = self._fit(tokens, rng)
            if found is None:
                continue
            hit = True
            text, ids = found
            prefix = tuple(ids[:PREFIX_TOKENS])
            if prefix not in self._used:
                self._used.add(prefix)
                return Prompt(text=text, tokens=len(ids))
        if hit:
            raise UsageError(
                f"no prompt of {tokens} tokens is left that shares no prefix with another",
                hint="lower --num-prompts or --concurrency, or ask for longer prompts",
            )
        raise UsageError(
            f"no text of exactly {tokens} tokens could be built with this tokenizer",
            hint="ask for another length",
        )

    def ids(self, text: str) -> list[int]:
        """As the engines encode a completion's prompt: special tokens included."""
        return list(self._tokenizer.encode(text).ids)

    def answer_ids(self, text: str) -> list[int]:
        """An answer's tokens, nothing added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _fit(self, tokens: int, rng: random.Random) -> tuple[str, list[int]] | None:
        pieces = rng.choices(self._pool, k=tokens)
        for _ in range(_CORRECTIONS):
            joined = "".join(pieces)
            found = [(text, self.ids(text)) for text in (joined, joined.lstrip())]
            for text, ids in found:
                if len(ids) == tokens:
                    return text, ids
            off = min((tokens - len(ids) for _, ids in found), key=abs)
            if off > 0:
                pieces += rng.choices(self._pool, k=off)
            else:
                del pieces[off:]
            if not pieces:
                return None
        return None


def _single_token_pieces(tokenizer: Tokenizer, rng: random.Random) -> list[str]:
    """Texts that each add one token after another word, in a seeded order.

    Words with a space before them where the vocabulary has any; else letters.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    words = {match[1] for token in vocabulary if (match := _MARKED_WORD.fullmatch(token))}
    words |= {token for token in vocabulary if _BARE_WORD.fullmatch(token)}
    candidates = [f" {word}" for word in sorted(words)]
    rng.shuffle(candidates)
    pool = _adding_one(tokenizer, candidates[:_POOL])
    pool = pool or _adding_one(tokenizer, [f" {letter}" for letter in _LETTERS])
    pool = pool or _adding_one(tokenizer, list(_LETTERS))
    if not pool:
        raise UsageError("this tokenizer has no words that prompts could be built from")
    return pool


def _adding_one(tokenizer: Tokenizer, pieces: list[str]) -> list[str]:
    anchor = "a"
    base = len(tokenizer.encode(anchor).ids)
    encoded = tokenizer.encode_batch([anchor + piece for piece in pieces])
    return [
        piece
        for piece, encoding in zip(pieces, encoded, strict=True)
        if len(encoding.ids) == base + 1
    ]
