"""A delivery that times what passes through it, and reads the engines' own counts of tokens."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdctl.runtime.router.delivery import Delivery
from pdctl.runtime.router.policy import Path
from pdctl.trace import monotonic_s

_USAGE = b'"usage"'


class Cached(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Of one answer, as engines write it."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: Cached | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return (details.cached_tokens if details is not None else None) or 0


class _Answer(msgspec.Struct, frozen=True):
    usage: Usage | None = None


_decoder = msgspec.json.Decoder(_Answer)


class Timed:
    """Hands everything on to `inner`. Times are `monotonic_s`.

    Args:
        first: called when a prompt is over: prefill has answered, or the first output, or the whole
            answer, is about to leave. It may be called again.
    """

    def __init__(self, inner: Delivery, first: Callable[[], None]) -> None:
        self._inner = inner
        self._first = first
        self.began_s = monotonic_s()
        self.first_s: float | None = None
        self.last_s = 0.0
        self.events = 0
        """With output, of a stream."""
        self.usage: Usage | None = None
        """Of the answer that the client sees."""
        self.prefill_usage: Usage | None = None
        self.has_recomputed = False

    @property
    def begun(self) -> bool:
        return self._inner.begun

    @property
    def streamed(self) -> bool:
        return self.events > 0

    def route(self, path: Path, room: int | None, retried: Path | None) -> None:
        self._inner.route(path, room, retried)

    def decided(self, text: str) -> None:
        self._inner.decided(text)

    def recomputed(self, path: Path) -> None:
        self.has_recomputed = True
        self._inner.recomputed(path)

    def prefilled(self, body: bytes) -> None:
        self._first()
        self.prefill_usage = _usage_of(body)
        self._inner.prefilled(body)

    async def whole(self, body: bytes, content_type: str) -> None:
        self._mark()
        self.usage = _usage_of(body)
        await self._inner.whole(body, content_type)

    async def event(self, raw: bytes) -> None:
        self._mark()
        self.events += 1
        if _USAGE in raw:
            self.usage = _usage_in(raw) or self.usage
        await self._inner.event(raw)

    async def end(self) -> None:
        await self._inner.end()

    def _mark(self) -> None:
        self.last_s = monotonic_s()
        if self.first_s is None:
            self.first_s = self.last_s
            self._first()


def _usage_of(body: bytes) -> Usage | None:
    try:
        return _decoder.decode(body).usage
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def _usage_in(raw: bytes) -> Usage | None:
    """Of the events in `raw`, the last one that has it."""
    lines = [line for line in raw.splitlines() if line.startswith(b"data:") and _USAGE in line]
    return _usage_of(lines[-1].removeprefix(b"data:").strip()) if lines else None
