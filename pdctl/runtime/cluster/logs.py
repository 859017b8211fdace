"""Reading a cluster's logs, on whatever host: one per replica, and those of router and agents."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta

import anyio
import msgspec

from pdctl.errors import HostError, UsageError
from pdctl.runtime.hosts.interface import RuntimeHost, Slice

LOOK_EVERY_S = 0.2
"""Files tell nobody that they grew."""
MAX_LINE_BYTES = 1 << 16
BLOCK_BYTES = 1 << 20
TAIL_BLOCK_BYTES = 1 << 16

_STAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """One log file. Reading raises HostError where its host can't be reached."""

    host: RuntimeHost
    path: str
    far: bool = False
    """Whether every look at it costs a round trip."""

    def size(self) -> int:
        return self.host.slice(self.path, 0, 0).size

    def slice(self, start: int, max_bytes: int = BLOCK_BYTES) -> Slice:
        return self.host.slice(self.path, start, max_bytes)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Whose log."""
    text: str


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which lines are wanted."""

    tail: int | None = None
    """At most so many of each log; None: all."""
    since: datetime | None = None
    pattern: re.Pattern[str] | None = None


def parse_since(text: str, now: datetime | None = None) -> datetime:
    """`10m`, `2h`, `90s`, `1d` ago, or a local date and time.

    Raises:
        UsageError: neither.
    """
    now = now or datetime.now()
    span = _SPAN.fullmatch(text.strip())
    if span:
        return now - timedelta(seconds=float(span[1]) * _UNITS[span[2]])
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise UsageError(
            f'--since "{text}" is not a time', hint="for example 10m, 2h, or 2026-01-31T12:00:00"
        ) from None
    return moment if moment.tzinfo is None else moment.astimezone().replace(tzinfo=None)


def parse_pattern(text: str) -> re.Pattern[str]:
    """Raises UsageError where it is no regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f'--grep "{text}" is not a regular expression: {error}') from None


def sizes(logs: Mapping[str, Log]) -> dict[str, int]:
    """Bytes of each log now: where `read` may end and `follow` begin, so that no line is
    shown twice or never."""
    return {name: log.size() for name, log in logs.items()}


def read(
    logs: Mapping[str, Log], selection: Selection, ends: Mapping[str, int] | None = None
) -> Iterator[Line]:
    """The wanted lines of each log up to its byte in `ends`, one log after the other.

    A line without a time of its own belongs to the line before it.
    """
    ends = sizes(logs) if ends is None else ends
    for name, log in logs.items():
        wanted: Iterable[str] = selected(_lines(log, selection, ends[name]), selection)
        if selection.tail is not None:
            wanted = deque(wanted, maxlen=selection.tail)
        for text in wanted:
            yield Line(name=name, text=text)


def selected(lines: Iterable[str], selection: Selection) -> Iterator[str]:
    recent = selection.since is None
    for line in lines:
        if selection.since is not None:
            stamp = _STAMP.search(line[:64])
            if stamp:
                recent = datetime.fromisoformat(stamp[0]) >= selection.since
        if recent and (selection.pattern is None or selection.pattern.search(line)):
            yield line


def _lines(log: Log, selection: Selection, end: int) -> Iterator[str]:
    """Whole lines before byte `end`; only so many as `tail` needs, where it alone decides."""
    plain = selection.since is None and selection.pattern is None
    start = 0
    if plain and selection.tail is not None:
        start = _start_of_last(log, selection.tail, end)
    rest = b""
    while start < end:
        content = log.slice(start, min(BLOCK_BYTES, end - start)).content
        if not content:
            break
        start += len(content)
        *whole, rest = (rest + content).split(b"\n")
        yield from map(_text, whole)
    if rest:
        yield _text(rest)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace").rstrip("\r\n")


def _start_of_last(log: Log, count: int, end: int) -> int:
    """Some byte before the last `count` lines, at the start of a block."""
    start, newlines = end, 0
    while start > 0 and newlines <= count:
        block_start = max(0, start - TAIL_BLOCK_BYTES)
        newlines += log.slice(block_start, start - block_start).content.count(b"\n")
        start = block_start
    return start


async def follow(
    logs: Mapping[str, Log],
    *,
    pattern: re.Pattern[str] | None = None,
    starts: Mapping[str, int] | None = None,
    missing: Callable[[str, str], None] = lambda name, why: None,
) -> AsyncIterator[Line]:
    """Lines as they are written from now (or `starts`) on; never ends. A log that starts anew
    is read from its start; one whose host is away is read on when that is back.

    Args:
        missing: told (name, why) each time when a log can't be read any more.
    """
    starts = sizes(logs) if starts is None else starts
    tails = {name: _Tail(log, starts[name]) for name, log in logs.items()}
    away: set[str] = set()
    while True:
        for name, tail in tails.items():
            try:
                lines = await tail.grown()
            except HostError as error:
                if name not in away:
                    away.add(name)
                    missing(name, error.message)
                continue
            away.discard(name)
            for text in lines:
                if pattern is None or pattern.search(text):
                    yield Line(name=name, text=text)
        await anyio.sleep(LOOK_EVERY_S)


class _Tail:
    """What one log has grown by since the last look."""

    def __init__(self, log: Log, offset: int) -> None:
        self._log = log
        self._offset = offset
        self._rest = b""

    async def grown(self) -> list[str]:
        part = await self._slice()
        if part.size < self._offset:
            self._offset, self._rest = 0, b""
            part = await self._slice()
        self._offset += len(part.content)
        *whole, self._rest = (self._rest + part.content).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            whole.append(self._rest)
            self._rest = b""
        return [_text(line) for line in whole]

    async def _slice(self) -> Slice:
        if self._log.far:
            return await anyio.to_thread.run_sync(self._log.slice, self._offset)
        return self._log.slice(self._offset)
