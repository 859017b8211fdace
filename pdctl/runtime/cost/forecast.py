"""What `pdctl plan` says of a cluster's paths from what was measured of them: times to the first
token by prompt length, and where splitting begins to pay. Nothing is said of what was not
measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from pdctl.runtime.cost.book import Book
from pdctl.runtime.cost.curve import Curve, Point, fit, medians
from pdctl.runtime.cost.record import PathRecord, Sample, holds, replicas_of
from pdctl.topology.model import PAGE_TOKENS
from pdctl.topology.plan import Plan

LENGTHS = (51, 184, 744, 2844, 8000)
FEW = 3
"""Fewer of the longest prompts than these are a first impression."""
SCANNED = 64
"""Lengths that are compared for a break-even."""
ABOUT = 0.5
"""Octaves between two lengths that are about the same."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    tokens: int
    ttft_ms: float
    samples: int
    """Requests of about this length (half an octave) that were measured; what others say of it
    is a curve through all lengths."""
    extrapolated: bool
    """Far beyond the prompts that were measured."""


class PathForecast(msgspec.Struct, frozen=True, kw_only=True):
    """One path. Empty cells: nothing was measured."""

    path: str
    samples: int
    engines: tuple[str, ...] = ()
    """Versions that were measured, prefill first."""
    cells: tuple[Cell, ...] = ()
    step_ms: float | None = None
    """Between two tokens of one stream."""
    steps: int = 0
    """Streams by which `step_ms` is known, of any path that ends on the same replica."""


class PairForecast(msgspec.Struct, frozen=True, kw_only=True):
    """One pair beside the fastest replica that could answer instead."""

    path: str
    alone: str | None
    """That replica, where one was measured."""
    break_even_tokens: int | None = None
    """From this prompt length on the pair is faster, within the context; None: never."""
    pays_below_tokens: int | None = None
    """Where the pair is faster for short prompts only: up to this length."""
    round_trip_ms: float | None = None
    """Between the two ends; None where their data plane did not tell."""
    fixed_ms: float | None = None
    """What a handoff costs whatever the prompt's length; None where it can't be told apart."""
    link_bytes_per_s: float | None = None
    """What pages that nothing hid travelled at; None where it was never what took time."""
    enough_bytes_per_s: float | None = None
    """A link at which the pair would be as fast as the other, at `enough_at_tokens`."""
    enough_at_tokens: int | None = None
    words: str = ""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    lengths: tuple[int, ...]
    paths: tuple[PathForecast, ...]
    pairs: tuple[PairForecast, ...]
    unmeasured: tuple[str, ...]
    """Paths of which nothing is known."""


def forecast(plan: Plan, records: Mapping[str, PathRecord], paths: Sequence[str]) -> Forecast:
    """Of these paths, by the records that hold for this plan."""
    valid = {
        path: record
        for path, record in records.items()
        if path in paths and holds(record, plan, path, None) and record.samples
    }
    book = Book(valid)
    lengths = tuple(n for n in LENGTHS if n <= plan.context_length)
    return Forecast(
        lengths=lengths,
        paths=tuple(_path(path, book, lengths) for path in paths),
        pairs=tuple(_pair(plan, path, book, paths) for path in paths if ">" in path),
        unmeasured=tuple(path for path in paths if path not in valid),
    )


def _path(path: str, book: Book, lengths: Sequence[int]) -> PathForecast:
    record, curve = book.record(path), book.curve(path)
    if record is None or curve is None:
        return PathForecast(path=path, samples=0)
    steps = book.steps_s(replicas_of(path)[-1])
    step_s = book.step_s(replicas_of(path)[-1])
    return PathForecast(
        path=path,
        samples=len(record.samples),
        engines=record.versions,
        cells=tuple(
            Cell(
                tokens=n,
                ttft_ms=curve.at(n) * 1e3,
                samples=sum(abs(math.log2(s.tokens / n)) <= ABOUT for s in record.samples),
                extrapolated=book.extrapolates(path, n),
            )
            for n in lengths
        ),
        step_ms=None if step_s is None else step_s * 1e3,
        steps=len(steps),
    )


def _pair(plan: Plan, path: str, book: Book, paths: Sequence[str]) -> PairForecast:
    alone = _fastest_alone(path, book, paths)
    ours, record = book.curve(path), book.record(path)
    if alone is None or ours is None or record is None:
        missing = [p for p in (path, replicas_of(path)[1]) if book.curve(p) is None]
        words = f"nothing is known yet of {' and '.join(missing) or 'any replica alone'}"
        return PairForecast(path=path, alone=alone, words=words)
    theirs = book.curve(alone)
    assert theirs is not None, "it was chosen for its curve"
    starts, ends = _pays(ours, theirs, plan.context_length)
    prefill = fit(medians([(s.tokens, s.prefill_s) for s in record.samples if s.prefill_s]))
    found = PairForecast(
        path=path,
        alone=alone,
        break_even_tokens=starts,
        pays_below_tokens=ends,
        round_trip_ms=None if record.round_trip_s is None else record.round_trip_s * 1e3,
        fixed_ms=_fixed_ms(record.samples),
        link_bytes_per_s=_link(record.samples, plan.page_bytes),
    )
    found = _with_enough(found, plan, prefill, theirs, record.samples)
    words = _words(plan, found, ours, theirs, prefill)
    if min(curve.points[-1].count for curve in (ours, theirs)) < FEW:
        words += " (by few requests)"
    return msgspec.structs.replace(found, words=words)


def _fastest_alone(path: str, book: Book, paths: Sequence[str]) -> str | None:
    """The pair's own decode replica where it answers alone; else the fastest other."""
    decode = replicas_of(path)[1]
    if book.curve(decode) is not None:
        return decode
    measured = [p for p in paths if ">" not in p and book.curve(p) is not None]
    return min(measured, key=lambda p: _at(book, p), default=None)


def _at(book: Book, path: str) -> float:
    curve = book.curve(path)
    assert curve is not None, "only measured paths are compared"
    return curve.at(LENGTHS[2])


def _scanned(context: int) -> list[int]:
    steps = {round(2 * (max(context, 4) / 2) ** (i / (SCANNED - 1))) for i in range(SCANNED)}
    return sorted(n for n in steps if n <= context)


def _pays(ours: Curve, theirs: Curve, context: int) -> tuple[int | None, int | None]:
    """(from which length on, up to which length) the pair is faster; a None for neither."""
    lengths = _scanned(context)
    wins = [ours.at(n) < theirs.at(n) for n in lengths]
    if wins[-1]:
        lost = [n for n, win in zip(lengths, wins, strict=True) if not win]
        return (lengths[0] if not lost else next(n for n in lengths if n > lost[-1])), None
    won = [n for n, win in zip(lengths, wins, strict=True) if win]
    return None, won[-1] if won else None


def _unhidden(samples: Sequence[Sample], page_bytes: int | None) -> list[Point]:
    """Seconds from the end of P's computing to Done, by bytes."""
    if page_bytes is None:
        return []
    return [
        Point(-(-point.tokens // PAGE_TOKENS) * page_bytes, point.seconds, point.count)
        for point in medians([(s.tokens, s.transfer_s) for s in samples if s.transfer_s])
    ]


def _link(samples: Sequence[Sample], page_bytes: int | None) -> float | None:
    by_bytes: dict[float, Point] = {p.tokens: p for p in _unhidden(samples, page_bytes)}
    line = fit(list(by_bytes.values()), terms=2) if len(by_bytes) > 1 else None
    return 1 / line.linear_s if line is not None and line.linear_s > 0 else None


def _fixed_ms(samples: Sequence[Sample]) -> float | None:
    """Of the shortest prompt that was measured: what neither P's computing nor the pages take."""
    told = [(s.tokens, s.ttft_s - s.prefill_s - s.transfer_s)
            for s in samples if s.prefill_s is not None and s.transfer_s is not None]  # fmt: skip
    points = medians([(tokens, rest) for tokens, rest in told if rest > 0])
    return points[0].seconds * 1e3 if points else None


def _with_enough(
    found: PairForecast,
    plan: Plan,
    prefill: Curve | None,
    theirs: Curve,
    samples: Sequence[Sample],
) -> PairForecast:
    """With the link that would be enough: pages travel in what the pair's computing leaves of
    the other's time. An upper bound, as if nothing of it were hidden behind computing."""
    if prefill is None or plan.token_kv_bytes is None or found.fixed_ms is None:
        return found
    tokens = round(min(max(s.tokens for s in samples), plan.context_length))
    left_s = theirs.at(tokens) - prefill.at(tokens) - found.fixed_ms / 1e3
    if left_s <= 0:
        return found
    return msgspec.structs.replace(
        found,
        enough_bytes_per_s=tokens * plan.token_kv_bytes / left_s,
        enough_at_tokens=tokens,
    )


def _words(
    plan: Plan, found: PairForecast, ours: Curve, theirs: Curve, prefill: Curve | None
) -> str:
    p, d = (plan.replica(name) for name in replicas_of(found.path))
    pair = f"{p.engine} → {d.engine} ({found.path})"
    if found.break_even_tokens is not None:
        longest = round(min(ours.longest, theirs.longest))
        times = theirs.at(longest) / ours.at(longest)
        start = found.break_even_tokens
        since = "at every length" if start <= 2 else f"from {start} tokens on"
        if start > longest:
            return f"{pair} pays {since}, beyond the {longest} that were measured"
        return f"{pair} pays {since}: × {times:.3g} at {longest} tokens, against {found.alone}"
    if found.pays_below_tokens is not None:
        return f"{pair} pays up to {found.pays_below_tokens} tokens only, against {found.alone}"
    return f"{pair} never pays here: {_why(found, ours, theirs, prefill)}"


def _why(found: PairForecast, ours: Curve, theirs: Curve, prefill: Curve | None) -> str:
    tokens = round(ours.longest)
    if prefill is not None:
        slower = prefill.at(tokens) / theirs.at(tokens)
        if slower > 1.05:
            return f"prefill is {slower:.2g} × slower than {found.alone}'s own at {tokens} tokens"
        if found.enough_bytes_per_s is not None and found.link_bytes_per_s is not None:
            return (
                f"the link carries {_rate(found.link_bytes_per_s)}; at {tokens} tokens "
                f"{_rate(found.enough_bytes_per_s)} would be enough"
            )
        if slower > 0.95:
            return (
                f"both compute prompts equally fast, so the handoff only adds: × "
                f"{ours.at(tokens) / theirs.at(tokens):.2g} at {tokens} tokens"
            )
    return f"× {ours.at(tokens) / theirs.at(tokens):.2g} of {found.alone}'s time at {tokens} tokens"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s"
