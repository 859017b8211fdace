"""Reading a cluster's logs: one file per replica, and one each for router and agents."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path

import anyio
import msgspec

from pdctl.errors import UsageError

LOOK_EVERY_S = 0.2
"""Files tell nobody that they grew."""
MAX_LINE_BYTES = 1 << 16
TAIL_BLOCK_BYTES = 1 << 16

_STAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


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


def sizes(logs: Mapping[str, Path]) -> dict[str, int]:
    """Bytes of each log now: where `read` may end and `follow` begin, so that no line is
    shown twice or never."""
    return {name: _size(path) for name, path in logs.items()}


def read(
    logs: Mapping[str, Path], selection: Selection, ends: Mapping[str, int] | None = None
) -> Iterator[Line]:
    """The wanted lines of each log up to its byte in `ends`, one log after the other.

    A line without a time of its own belongs to the line before it.
    """
    ends = sizes(logs) if ends is None else ends
    for name, path in logs.items():
        wanted: Iterable[str] = selected(_lines(path, selection, ends[name]), selection)
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


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _lines(path: Path, selection: Selection, end: int) -> Iterator[str]:
    """Whole lines before byte `end`; only so many as `tail` needs, where it alone decides."""
    start = 0
    try:
        with path.open("rb") as file:
            plain = selection.since is None and selection.pattern is None
            if plain and selection.tail is not None:
                start = _start_of_last(file.fileno(), selection.tail, end)
            file.seek(start)
            while start < end and (raw := file.readline(end - start)):
                start += len(raw)
                yield raw.decode("utf-8", "replace").rstrip("\r\n")
    except FileNotFoundError:
        return


def _start_of_last(descriptor: int, count: int, end: int) -> int:
    """Some byte before the last `count` lines, at the start of a block."""
    start, newlines = end, 0
    while start > 0 and newlines <= count:
        block_start = max(0, start - TAIL_BLOCK_BYTES)
        newlines += os.pread(descriptor, start - block_start, block_start).count(b"\n")
        start = block_start
    return start


async def follow(
    logs: Mapping[str, Path],
    *,
    pattern: re.Pattern[str] | None = None,
    starts: Mapping[str, int] | None = None,
) -> AsyncIterator[Line]:
    """Lines as they are written from now (or `starts`) on; never ends. A log that starts anew
    is read from its start."""
    starts = sizes(logs) if starts is None else starts
    tails = {name: _Tail(path, starts[name]) for name, path in logs.items()}
    while True:
        for name, tail in tails.items():
            for text in tail.grown():
                if pattern is None or pattern.search(text):
                    yield Line(name=name, text=text)
        await anyio.sleep(LOOK_EVERY_S)


class _Tail:
    """What one file has grown by since the last look."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self._offset = offset
        self._rest = b""

    def grown(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                raw = file.read(1 << 20)
        except FileNotFoundError:
            self._offset, self._rest = 0, b""
            return []
        self._offset += len(raw)
        *whole, self._rest = (self._rest + raw).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace").rstrip("\r") for line in whole]
