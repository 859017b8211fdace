"""The tables of a sweep on terminals of any width."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console
from runtime.bench.bench_points import cells, good, sample, turn

from pdctl.runtime.bench.summary import Point
from pdctl.runtime.bench.terminal import tables


def shown(points: tuple[Point, ...], width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(tables(points))
    return console.export_text()


def many() -> tuple[Point, ...]:
    """One decode engine alone and nine pairs, at two lengths, in large figures."""
    alone, pair = good()
    pairs = [
        msgspec.structs.replace(
            pair,
            pd_path=f"p{n}>d0",
            median_ttft_ms=12345.6 + n,
            pd_floor_ms=12000.5,
            pd_over_local_ms=-1234.5,
            pd_host_bytes=104857600,
        )
        for n in range(9)
    ]
    return tuple(
        msgspec.structs.replace(p, pd_input_len=tokens)
        for tokens in (66, 2844)
        for p in (alone, *pairs)
    )


def test_the_mark_and_its_reason_are_shown() -> None:
    points = cells([turn(sample(), pair=False)] * 2, [turn(sample("x")), turn(sample())])
    text = shown(points, 160)
    assert "1000.0†" in text
    assert "† p0>d0 at 66 tokens: text differs from d0's in 1 of 2 requests" in text


@pytest.mark.parametrize("width", [80, 120, 200])
def test_every_figure_is_whole_on_every_usual_width(width: int) -> None:
    text = shown(many(), width)
    assert "…" not in text
    for figure in ("12345.6", "12000.5", "-1234.5", "104,857,600", "p8>d0"):
        assert figure in text
    assert max(map(len, text.splitlines())) <= width


def test_medians_have_a_column_per_path_or_a_row_where_those_are_too_many() -> None:
    wide, narrow = shown(many(), 200).splitlines(), shown(many(), 80).splitlines()
    assert wide[1].split() == ["tokens", "conc.", "d0", *(f"p{n}>d0" for n in range(9))]
    assert narrow[1].split() == ["66", "2844"]
    assert narrow[2].split() == ["d0", "1000.0", "1000.0"]
    assert narrow[3].split() == ["p0>d0", "12345.6", "12345.6"]


def test_requests_at_once_stand_beside_the_length_where_places_are_columns() -> None:
    points = tuple(msgspec.structs.replace(p, pd_concurrency=4) for p in many())
    assert shown(points, 80).splitlines()[1].split() == ["66", "×", "4", "2844", "×", "4"]
