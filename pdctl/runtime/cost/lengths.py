"""Prompt tokens of a body that nobody has tokenised.

The decision needs a length, not tokens: an error of a tenth moves what is predicted by about a
tenth on every path alike. So the router counts UTF-8 bytes, which is cheap, and learns from
every answer's `usage` how many tokens they are: a straight line per kind of request (a chat's
template adds the same tokens to each). Bytes rather than characters, since an alphabet with
long encodings has more tokens per character, and about as many per byte. A prompt of token ids
is exact. No tokenizer is loaded for this; where the policy has read a prompt, its count is taken
instead of one from here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from pdctl.runtime.cost.curve import Curve, Point, fit
from pdctl.runtime.cost.record import LENGTHS_KEPT

COMPLETION, CHAT, TRIAL = "completion", "chat", "trial"
"""Kinds of request; the last one's prompts are pdctl's own, whose text is nobody's."""
_TOKENS_PER_BYTE = 0.3
"""Of English text, until the first answer says better."""
_CHAT_TOKENS = 12
"""A template's own, until then."""
_TYPICAL = 1000
"""Bytes."""


class Lengths:
    """Owned by the event loop."""

    def __init__(self, known: Mapping[str, tuple[tuple[int, int], ...]] | None = None) -> None:
        self._known = {
            kind: deque((known or {}).get(kind, ()), maxlen=LENGTHS_KEPT)
            for kind in (COMPLETION, CHAT, TRIAL)
        }
        self._lines: dict[str, Curve | None] = {}

    @property
    def known(self) -> dict[str, tuple[tuple[int, int], ...]]:
        return {kind: tuple(pairs) for kind, pairs in self._known.items()}

    def tokens(self, body: Mapping[str, Any]) -> int:
        """At least 1."""
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return len(prompt)
        return self.estimate(kind_of(body), bytes_of(body))

    def estimate(self, kind: str, size: int) -> int:
        """Tokens of so many bytes; before anything of that kind was learnt, by the trials."""
        line = self._line(kind)
        if line is not None:
            return max(1, round(line.fitted(size)))
        trial = self._line(TRIAL)
        ratio = _TOKENS_PER_BYTE if trial is None else trial.fitted(_TYPICAL) / _TYPICAL
        return max(1, round(ratio * size) + (_CHAT_TOKENS if kind == CHAT else 0))

    def learn(self, body: Mapping[str, Any], tokens: int, kind: str | None = None) -> None:
        """What an engine counted; `kind` where it is not the body's own."""
        size = bytes_of(body)
        if tokens > 0 and size > 0 and not isinstance(body.get("prompt"), list):
            kind = kind or kind_of(body)
            self._known[kind].append((size, tokens))
            self._lines.pop(kind, None)

    def _line(self, kind: str) -> Curve | None:
        """tokens = fixed + bytes × ratio, of the latest; None before the first."""
        if kind not in self._lines:
            by_size: dict[int, int] = dict(self._known[kind])
            points = [Point(size, tokens) for size, tokens in sorted(by_size.items())]
            self._lines[kind] = fit(points, terms=2)
        return self._lines[kind]


def kind_of(body: Mapping[str, Any]) -> str:
    return CHAT if "messages" in body else COMPLETION


def bytes_of(body: Mapping[str, Any]) -> int:
    """UTF-8 bytes of everything in a body that becomes prompt."""
    if "messages" not in body:
        return _text_bytes(body.get("prompt"))
    return _text_bytes(body["messages"]) + _text_bytes(body.get("tools"))


def _text_bytes(value: object) -> int:
    """Of all strings inside; names of fields are not counted."""
    total, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            total += len(one) if one.isascii() else len(one.encode("utf-8", "surrogatepass"))
        elif isinstance(one, dict):
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
    return total
