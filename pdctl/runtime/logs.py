"""Reading a cluster's logs: one file per replica, and one each for router and agents."""

from __future__ import annotations

import os
import re
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


def read(logs: Mapping[str, Path], selection: Selection) -> Iterator[Line]:
    """The wanted lines of each log, one log after the other.

    A line without a time of its own belongs to the line before it.
    """
    for name, path in logs.items():
        wanted = selected(_lines(path, selection), selection)
        if selection.tail is not None:
            wanted = wanted[-selection.tail :] if selection.tail else []
        yield from (Line(name=name, text=text) for text in wanted)


def selected(lines: Iterable[str], selection: Selection) -> list[str]:
    found = []
    recent = selection.since is None
    for line in lines:
        if selection.since is not None:
            stamp = _STAMP.search(line[:64])
            if stamp:
                recent = datetime.fromisoformat(stamp[0]) >= selection.since
        if recent and (selection.pattern is None or selection.pattern.search(line)):
            found.append(line)
    return found


def _lines(path: Path, selection: Selection) -> Iterable[str]:
    """All lines, or only so many from the end as `tail` alone asks for."""
    plain = selection.since is None and selection.pattern is None
    try:
        with path.open("rb") as file:
            if plain and selection.tail is not None:
                return _last(file.fileno(), selection.tail)
            return [raw.decode("utf-8", "replace").rstrip("\r\n") for raw in file]
    except FileNotFoundError:
        return []


def _last(descriptor: int, count: int) -> list[str]:
    end = os.fstat(descriptor).st_size
    block = b""
    while end > 0 and block.count(b"\n") <= count:
        start = max(0, end - TAIL_BLOCK_BYTES)
        block = os.pread(descriptor, end - start, start) + block
        end = start
    return block.decode("utf-8", "replace").splitlines()[-count:] if count else []


async def follow(
    logs: Mapping[str, Path], *, pattern: re.Pattern[str] | None = None
) -> AsyncIterator[Line]:
    """Lines as they are written from now on; never ends. A log that starts anew is read from
    its start."""
    tails = {name: _Tail(path) for name, path in logs.items()}
    while True:
        for name, tail in tails.items():
            for text in tail.grown():
                if pattern is None or pattern.search(text):
                    yield Line(name=name, text=text)
        await anyio.sleep(LOOK_EVERY_S)


class _Tail:
    """What one file has grown by since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
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
