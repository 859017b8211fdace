"""The tables on a terminal, as wide as it is: no figure is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from pdctl.runtime.bench.report import (
    KEYS,
    TIMES,
    details,
    goodput_lines,
    link_lines,
    matrix,
    remarks,
)
from pdctl.runtime.bench.summary import Point

_LEFT = ("path", "")


def tables(points: Sequence[Point]) -> RenderableType:
    """Median TTFT by length and path, every metric, then links and marks."""
    headers, rows = details(points)
    times = [headers.index(name) for name in (*KEYS, *TIMES)]
    others = [at for at, name in enumerate(headers) if name not in TIMES]
    lines = [*goodput_lines(points), *link_lines(points), *remarks(points)]
    return Group(
        Text("median TTFT (ms)", style="italic"),
        _Medians(*matrix(points)),
        Text("\nper request, medians (ms)", style="italic"),
        _table([headers[at] for at in times], [[row[at] for at in times] for row in rows]),
        Text("\nper request, moved", style="italic"),
        _table([headers[at] for at in others], [[row[at] for at in others] for row in rows]),
        *(Text(line) for line in lines),
    )


class _Medians:
    """A row per place and a column per path; the other way round where that is too wide."""

    def __init__(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._headers, self._rows = headers, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        upright = _table(self._headers, self._rows)
        if console.measure(upright, options=options.update(width=10_000)).maximum <= (
            options.max_width
        ):
            yield upright
            return
        places = [row[0] if row[1] == "1" else f"{row[0]} × {row[1]}" for row in self._rows]
        turned = zip(self._headers[2:], *(row[2:] for row in self._rows), strict=True)
        yield _table(["", *places], list(map(list, turned)))


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """What is too wide goes on in the next line."""
    found = Table(box=None, pad_edge=False)
    for name in headers:
        side: Literal["left", "right"] = "left" if name in _LEFT else "right"
        found.add_column(name.removesuffix(" ms"), justify=side, overflow="fold")
    for row in rows:
        found.add_row(*row)
    return found
