"""A result folder: one JSON file per point, and the tables as Markdown and HTML."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdctl.errors import PdctlError, UsageError
from pdctl.runtime.bench.page import page
from pdctl.runtime.bench.report import markdown
from pdctl.runtime.bench.summary import Point, Run


def writable(directory: Path) -> Path:
    """Makes the folder for results; UsageError where nothing can be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--result-dir {directory} cannot be made: {error.strerror}") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"--result-dir {directory} is not writable")
    return directory


def save_points(directory: Path, run: Run, points: Sequence[Point]) -> tuple[Path, ...]:
    """One JSON file per point, each whole or not there; PdctlError where they can't be written."""
    return tuple(
        _write(
            directory / f"{_stem(run)}-{_file_name(p)}.json",
            msgspec.json.format(msgspec.json.encode(p), indent=2) + b"\n",
        )
        for p in points
    )


def save_report(directory: Path, run: Run, points: Sequence[Point]) -> tuple[Path, ...]:
    """The Markdown and the HTML file of all points of one run; PdctlError as above."""
    return (
        _write(directory / f"{_stem(run)}.md", markdown(run, points).encode()),
        _write(directory / f"{_stem(run)}.html", page(run, points).encode()),
    )


def read_points(directory: Path) -> tuple[tuple[Point, ...], tuple[str, ...]]:
    """Every point in the folder, and the names of JSON files that are none, both by file name.

    Raises UsageError where the folder cannot be read.
    """
    points: list[Point] = []
    unreadable: list[str] = []
    try:
        for path in sorted(directory.iterdir()):
            if path.suffix != ".json" or path.name.startswith("."):
                continue
            try:
                points.append(msgspec.json.decode(path.read_bytes(), type=Point))
            except msgspec.DecodeError:
                unreadable.append(path.name)
    except OSError as error:
        raise UsageError(f"cannot read the results in {directory}: {error.strerror}") from error
    return tuple(points), tuple(unreadable)


def _write(path: Path, content: bytes) -> Path:
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise PdctlError(f"cannot write results: {error}") from error
    return path


def _stem(run: Run) -> str:
    return f"{run.cluster}-{run.date}"


def _file_name(p: Point) -> str:
    return f"{p.pd_path.replace('>', '-to-')}-in{p.pd_input_len}-conc{p.pd_concurrency}"
