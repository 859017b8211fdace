"""Two result folders side by side: medians, their change, and whether it is beyond the scatter.

Pure but for `newest_runs` and `newest_run`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdctl.errors import UsageError
from pdctl.runtime.bench.folder import read_points
from pdctl.runtime.bench.report import ABSENT, MARKED
from pdctl.runtime.bench.summary import Point

CHANCE = 0.02
"""A change is beyond the scatter where two runs of the same speed would differ as much less
often than this (Mann-Whitney, two-sided, with the correction for continuity). Of five samples
against five that is where none of one side lies among the other's."""

MUST_AGREE = ("model", "contract", "output_len", "seed")
"""Parts of the setting without which two runs did not measure the same."""

FEWEST = 5
"""Samples a side; fewer could not show a change, however large."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one cell in both folders. Milliseconds."""

    path: str
    input_len: int
    concurrency: int
    metric: str
    """ttft | tpot | e2el"""
    before_ms: float
    after_ms: float
    percent: float
    beyond_scatter: bool | None
    """None where there are too few samples to say."""
    doubtful: bool
    """Either cell is marked."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    """What else differs between the runs, and cells that only one of them has."""


def newest_runs(before: Path, after: Path) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Of two folders; UsageError where they are one, or as `newest_run`."""
    if before.resolve() == after.resolve():
        raise UsageError(
            f"--compare: {before} and {after} are the same folder",
            hint="keep what is to be compared apart: pdctl bench TOPOLOGY --result-dir AFTER "
            "--save-result",
        )
    return newest_run(before), newest_run(after)


def newest_run(directory: Path) -> tuple[Point, ...]:
    """Points of the newest run in a folder; UsageError where there is none, or a file of it
    cannot be read."""
    points, unreadable = read_points(directory)
    if unreadable:
        raise UsageError(
            f"--compare: {directory / unreadable[0]} is no result of this version",
            hint="move it elsewhere, or measure again",
        )
    if not points:
        raise UsageError(
            f"--compare: there is no result in {directory}",
            hint="results are written by pdctl bench TOPOLOGY --save-result",
        )
    date = max(p.date for p in points)
    return tuple(p for p in points if p.date == date)


def compare(before: Sequence[Point], after: Sequence[Point]) -> Comparison:
    """Every metric of every cell that both runs have, in the order of the first.

    Raises UsageError, naming what differs, where they did not measure the same.
    """
    old, new = before[0].pd_setting, after[0].pd_setting
    for name in MUST_AGREE:
        if old.get(name) != new.get(name):
            raise UsageError(
                f"--compare: the runs measured different things: {name} is {old.get(name)} in "
                f"one and {new.get(name)} in the other"
            )
    left, right = ({_cell(p): p for p in points} for points in (before, after))
    common = [cell for cell in sorted(left) if cell in right]
    if not common:
        raise UsageError(
            "--compare: the runs have no cell in common: "
            f"{_words(min(left))} in one, {_words(min(right))} in the other"
        )
    changes = [
        change
        for cell in common
        for metric in _SAMPLES
        if (change := _change(metric, left[cell], right[cell])) is not None
    ]
    return Comparison(changes=tuple(changes), notes=tuple(_notes(before, after)))


def beyond_scatter(before: Sequence[float], after: Sequence[float]) -> bool | None:
    """Whether two samples differ by more than chance (see CHANCE); None under FEWEST a side."""
    n, m = len(before), len(after)
    if min(n, m) < FEWEST:
        return None
    left, right = np.asarray(before)[:, None], np.asarray(after)[None, :]
    wins = float((left > right).sum() + 0.5 * (left == right).sum())
    _, tied = np.unique(np.concatenate([before, after]), return_counts=True)
    ties = float((tied**3 - tied).sum()) / ((n + m) * (n + m - 1))
    spread = math.sqrt(n * m / 12 * (n + m + 1 - ties))
    if spread == 0:
        return False
    z = max(0.0, abs(wins - n * m / 2) - 0.5) / spread
    return math.erfc(z / math.sqrt(2)) < CHANCE


def comparison_table(found: Comparison) -> RenderableType:
    table = Table(title="medians (ms)", title_justify="left", box=None, pad_edge=False)
    for name in (
        "tokens",
        "conc.",
        "path",
        "metric",
        "before",
        "after",
        "change",
        "beyond scatter",
    ):
        table.add_column(name, justify="left" if name in ("path", "metric") else "right")
    for c in found.changes:
        said = {True: "yes", False: "no", None: ABSENT}[c.beyond_scatter]
        table.add_row(
            str(c.input_len),
            str(c.concurrency),
            Text(c.path + (MARKED if c.doubtful else "")),
            c.metric.upper(),
            f"{c.before_ms:.1f}",
            f"{c.after_ms:.1f}",
            f"{c.percent:+.1f} %",
            said,
        )
    return Group(table, *(Text(note) for note in found.notes))


def _change(metric: str, before: Point, after: Point) -> Change | None:
    old, new = _SAMPLES[metric](before), _SAMPLES[metric](after)
    if not old or not new:
        return None
    was, now = float(np.median(old)), float(np.median(new))
    return Change(
        path=before.pd_path,
        input_len=before.pd_input_len,
        concurrency=before.pd_concurrency,
        metric=metric,
        before_ms=was,
        after_ms=now,
        percent=(now / was - 1) * 100 if was > 0 else 0.0,
        beyond_scatter=beyond_scatter(old, new),
        doubtful=bool(before.pd_marks or after.pd_marks),
    )


def _ttfts_ms(p: Point) -> list[float]:
    return [t * 1000 for t, error in zip(p.ttfts, p.errors, strict=True) if t and not error]


def _e2els_ms(p: Point) -> list[float]:
    return [t * 1000 for t, error in zip(p.latencies, p.errors, strict=True) if not error]


def _tpots_ms(p: Point) -> list[float]:
    return [
        (latency - ttft) / (tokens - 1) * 1000
        for ttft, latency, tokens, error in zip(
            p.ttfts, p.latencies, p.output_lens, p.errors, strict=True
        )
        if ttft is not None and tokens > 1 and not error
    ]


_SAMPLES: dict[str, Callable[[Point], list[float]]] = {
    "ttft": _ttfts_ms,
    "tpot": _tpots_ms,
    "e2el": _e2els_ms,
}


def _notes(before: Sequence[Point], after: Sequence[Point]) -> list[str]:
    old, new = before[0], after[0]
    notes = [
        f"{name} differs"
        if name == "topology"
        else f"{name}: {_said(was)}, then {_said(new.pd_setting[name])}"
        for name, was in old.pd_setting.items()
        if name in new.pd_setting and was != new.pd_setting[name]
    ]
    for name in sorted(old.pd_versions.keys() | new.pd_versions.keys()):
        was, is_now = old.pd_versions.get(name, ABSENT), new.pd_versions.get(name, ABSENT)
        if was != is_now and f"{name}: {was}, then {is_now}" not in notes:
            notes.append(f"{name}: {was}, then {is_now}")
    if old.pd_machine != new.pd_machine:
        notes.append("the machines differ")
    left, right = {_cell(p) for p in before}, {_cell(p) for p in after}
    notes += [f"only before: {_words(cell)}" for cell in sorted(left - right)]
    notes += [f"only after: {_words(cell)}" for cell in sorted(right - left)]
    if min(p.completed for p in (*before, *after)) < FEWEST:
        notes.append(f"beyond scatter {ABSENT}: under {FEWEST} requests on a side say nothing")
    if any(p.pd_marks for p in (*before, *after)):
        notes.append(f"{MARKED} a cell that is doubtful in one of the runs")
    return notes


def _said(value: object) -> object:
    return ABSENT if value == "" else value


def _cell(p: Point) -> tuple[int, int, str]:
    return (p.pd_concurrency, p.pd_input_len, p.pd_path)


def _words(cell: tuple[int, int, str]) -> str:
    lanes, tokens, path = cell
    return f"{path} at {tokens} tokens" + (f" × {lanes}" if lanes > 1 else "")
