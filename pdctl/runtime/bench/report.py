"""Tables for people, as rows of text; and in Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from pdctl.runtime.bench.columns import Column
from pdctl.runtime.bench.measure import Place, Results, Turn
from pdctl.runtime.bench.summary import Point, Run, point

KEYS = ("tokens", "conc.", "path")
"""Headers of what names a point in the second table."""
TIMES = ("TTFT ms", "p95", "floor", "over local", "ITL ms", "TPOT ms", "E2EL ms")
MARKED = "†"
ABSENT = "–"

_Detail = tuple[str, Callable[[Point], str]]

_DETAILS: tuple[_Detail, ...] = (
    ("tokens", lambda p: str(p.pd_input_len)),
    ("conc.", lambda p: str(p.pd_concurrency)),
    ("path", lambda p: p.pd_path + (MARKED if p.pd_marks else "")),
    ("TTFT ms", lambda p: _ms(p.median_ttft_ms)),
    ("p95", lambda p: _ms(p.p95_ttft_ms)),
    ("floor", lambda p: _ms(p.pd_floor_ms)),
    (
        "over local",
        lambda p: ABSENT if p.pd_over_local_ms is None else f"{p.pd_over_local_ms:+.1f}",
    ),
    ("ITL ms", lambda p: _ms(p.median_itl_ms)),
    ("TPOT ms", lambda p: _ms(p.median_tpot_ms)),
    ("E2EL ms", lambda p: _ms(p.median_e2el_ms)),
    ("out tok/s", lambda p: f"{p.output_throughput:.1f}"),
    ("imported", lambda p: f"{p.pd_imported_tokens:g}"),
    ("host bytes", lambda p: f"{p.pd_host_bytes:,.0f}"),
    ("GPU bytes", lambda p: f"{p.pd_gpu_bytes:,.0f}"),
    ("ok", lambda p: f"{p.completed}/{p.num_prompts}"),
)
_GOODPUT: _Detail = (
    "goodput req/s",
    lambda p: ABSENT if p.request_goodput is None else f"{p.request_goodput:.2f}",
)


def points_of(
    run: Run,
    columns: Sequence[Column],
    results: Results,
    tokenise: Callable[[str], Sequence[int]],
) -> tuple[Point, ...]:
    """Every measured cell: by place, then by column, in the order of the sweep."""
    return tuple(
        point(
            run,
            place,
            column,
            cells[column.path],
            _turns_of(column.baseline, cells),
            _turns_of(column.prefill_alone, cells),
            tokenise,
        )
        for place, cells in results.turns.items()
        for column in columns
    )


def markdown(run: Run, points: Sequence[Point]) -> str:
    """The same two tables, how they were measured, and on what."""
    parts = [
        f"# {run.cluster}: {run.model}, {run.date}",
        "Median TTFT in milliseconds:",
        _markdown_table(*matrix(points)),
        "Every point (medians; bytes and imported tokens per request):",
        _markdown_table(*details(points)),
    ]
    lines = [*goodput_lines(points), *link_lines(points), *remarks(points)]
    if lines:
        parts.append("\n".join(f"- {line}" for line in lines))
    parts.append(f"Method: {run.method}")
    computes = {f"{name} computes in": dtype for name, dtype in run.compute_dtypes.items()}
    described = {**run.machine, **run.versions, **computes}
    parts.append("\n".join(f"- {name}: {value}" for name, value in described.items()))
    return "\n\n".join(parts) + "\n"


def details(points: Sequence[Point]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of the second table: a row per point, every metric; goodput where any
    point has objectives."""
    shown = [*_DETAILS, *([_GOODPUT] if any(p.pd_goodput for p in points) else [])]
    return [name for name, _ in shown], [[show(p) for _, show in shown] for p in points]


def remarks(points: Sequence[Point]) -> list[str]:
    """One sentence per mark, and per cell that is incomplete, was measured again, or lies under
    its floor."""
    lines: list[str] = []
    for p in points:
        cell = f"{p.pd_path} at {p.pd_input_len} tokens"
        if p.pd_concurrency > 1:
            cell += f" × {p.pd_concurrency}"
        lines += [f"{MARKED} {cell}: {mark.detail}" for mark in p.pd_marks]
        if p.pd_rounds < p.pd_rounds_asked:
            lines.append(f"{cell}: {p.pd_rounds} of {p.pd_rounds_asked} rounds, then interrupted")
        if p.pd_repeated_rounds:
            lines.append(
                f"{cell}: {p.pd_repeated_rounds} rounds run again, since something disturbed them"
            )
        under = (p.pd_floor_ms or 0.0) - (p.median_ttft_ms or math.inf)
        if under > 0:
            lines.append(
                f"{cell}: {under:.1f} ms under its floor, so that figures scatter by as much: "
                "its prefill engine took longer alone"
            )
        if p.pd_short_outputs:
            lines.append(
                f"{cell}: {p.pd_short_outputs} of {p.num_prompts} answers ended before "
                f"{p.pd_output_len} tokens"
            )
    return lines


def goodput_lines(points: Sequence[Point]) -> list[str]:
    """What counts as good, where it was asked for."""
    asked = [" ".join(f"{name}:{ms:g}" for name, ms in p.pd_goodput.items()) for p in points]
    return [
        f"goodput: requests per second within {limits} (ms)"
        for limits in dict.fromkeys(filter(None, asked))
    ]


def link_lines(points: Sequence[Point]) -> list[str]:
    """One sentence per link that was measured, with all pairs that go over it."""
    return [f"link of {paths}: {words}" for paths, words in links(points).items()]


def links(points: Sequence[Point]) -> dict[str, str]:
    """By paths, "p0>d0, p0>d1", what their link carries."""
    paths: dict[str, list[str]] = {}
    for path, p in {p.pd_path: p for p in points}.items():
        if p.pd_link_bytes_per_s is not None:
            paths.setdefault(_link_words(p), []).append(path)
    return {", ".join(over): words for words, over in paths.items()}


def _link_words(p: Point) -> str:
    speed = f"{(p.pd_link_bytes_per_s or 0.0) / 1e6:,.0f} MB/s"
    trip = p.pd_link_round_trip_ms
    return speed if trip is None else f"{speed}, round trip {trip:.3g} ms"


def _turns_of(path: str | None, cells: Mapping[str, list[Turn]]) -> list[Turn]:
    return cells.get(path, []) if path is not None else []


def matrix(points: Sequence[Point]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of the first table: a row per place, a column per path, median TTFT."""
    paths = list(dict.fromkeys(p.pd_path for p in points))
    places = list(dict.fromkeys(Place(p.pd_input_len, p.pd_concurrency) for p in points))
    by_cell = {(Place(p.pd_input_len, p.pd_concurrency), p.pd_path): p for p in points}
    rows = [
        [str(place.input_len), str(place.concurrency)]
        + [_matrix_cell(by_cell.get((place, path))) for path in paths]
        for place in places
    ]
    return ["tokens", "conc.", *paths], rows


def _matrix_cell(p: Point | None) -> str:
    if p is None:
        return ABSENT
    return _ms(p.median_ttft_ms) + (MARKED if p.pd_marks else "")


def _ms(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.1f}"


def _markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---:"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
