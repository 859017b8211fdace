"""Log probabilities in OpenAI's two shapes, streamed or not.

The library gives none in a stream, calls the first of its unsorted alternatives the chosen
token, and does not know completions' older form, in which `logprobs` is a whole number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a leading space in SentencePiece's tokens; decoding one alone would lose it."""


class Logprobs:
    """Of one request: what was sampled since the last answer or event. One HTTP thread."""

    def __init__(self) -> None:
        self.older = False
        """Whether the client asked in the older form."""
        self._kept: list[Any] = []
        self._offset = 0

    def translate(self, body: dict[str, Any]) -> None:
        """`logprobs: 2` becomes the library's own two fields; all else stays."""
        asked = body.get("logprobs")
        if isinstance(asked, bool) or not isinstance(asked, int):
            return
        self.older = True
        body["logprobs"] = True
        body["top_logprobs"] = asked or -1

    def keeping(self, responses: Iterable[Any], args: Any) -> Iterator[Any]:
        """The same responses, kept where `args` want log probabilities."""
        wanted = args.logprobs or args.top_logprobs > 0
        for response in responses:
            if wanted:
                self._kept.append(response)
            yield response

    def take(self, tokenizer: Any) -> dict[str, Any] | None:
        """What belongs to the answer or event that is written now; None where nothing does."""
        kept, self._kept = self._kept, []
        if not kept:
            return None
        entries = [_entry(tokenizer, response) for response in kept]
        return self._as_older(entries) if self.older else {"content": entries}

    def _as_older(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry["token"])
        tops = [
            {one["token"]: one["logprob"] for one in (*entry["top_logprobs"], entry)}
            for entry in entries
        ]
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": tops if any(e["top_logprobs"] for e in entries) else None,
            "text_offset": offsets,
        }


def _entry(tokenizer: Any, response: Any) -> dict[str, Any]:
    """The newer form's: the chosen token, and its alternatives with the likeliest first."""
    ranked = sorted(response.top_tokens or (), key=lambda one: -one["logprob"])
    top = [_named(tokenizer, one["id"], one["logprob"]) for one in ranked]
    return {**_named(tokenizer, response.token, response.logprob), "top_logprobs": top}


def _named(tokenizer: Any, token: int, logprob: float) -> dict[str, Any]:
    text = text_of(tokenizer, token)
    whole = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"id": token, "token": text, "logprob": logprob, "bytes": whole}


def text_of(tokenizer: Any, token: int) -> str:
    """As it stands in a text, with its leading space."""
    piece = tokenizer.convert_ids_to_tokens(token)
    text = str(tokenizer.convert_tokens_to_string([piece]))
    lost = piece.startswith(SPACE) and not text.startswith(" ")
    return f" {text}" if lost else text
