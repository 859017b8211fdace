"""How many tokens a text has at least, known without tokenising it."""

from __future__ import annotations

from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

SHRINKS = 4
"""At most so many bytes become one where a normaliser composes characters (Unicode's NFC)."""

WHITE = b" \t\n\r\v\f"


class Shortest:
    """For a tokeniser whose every token stands for a bounded number of bytes.

    Args:
        tokenizer: mlx-lm's wrapper, or transformers' own.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._token_bytes: int | None = None
        self._uncounted = b""
        model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        if type(model).__name__ != "BPE" or model.fuse_unk:
            return
        vocabulary = tokenizer.get_vocab()
        self._token_bytes = max((len(token.encode()) for token in vocabulary), default=None)
        # added tokens may swallow white space; what is in no token may be dropped
        whole = vocabulary.keys() >= {*ByteLevel.alphabet()}
        kept = whole or model.unk_token or model.byte_fallback
        strange = () if kept else (b for b in range(256) if b > 126 or chr(b) not in vocabulary)
        self._uncounted = bytes({*WHITE, *strange})

    def tokens(self, text: str) -> int:
        """A lower bound; 0 where none is known."""
        if self._token_bytes is None:
            return 0
        counted = text.encode().translate(None, self._uncounted)
        return len(counted) // (self._token_bytes * SHRINKS)
