"""Plots of a report as inline SVG: no script, no style attribute, colours by class.

Coordinates are of a box 420 wide, which a phone shows nearly at its own size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import msgspec

from pdctl.handoff.counters import PHASES
from pdctl.runtime.bench.markup import Html, joined, tag
from pdctl.runtime.bench.summary import Point

COLOURS = 6
"""Classes c0 to c5; a seventh path starts again, with another marker."""

_WIDTH, _HEIGHT = 420, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 408, 14, 256
_LABEL_GAP = 30
_ROW, _BAR_LEFT, _BAR_RIGHT = 30, 56, 312
_RADIUS = 4.5


class Scale(msgspec.Struct, frozen=True):
    """A logarithmic axis: `low` lies at `start`, `high` at `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)


def colour(number: int) -> str:
    return f"c{number % COLOURS}"


def ttft_plot(points: Sequence[Point], paths: Sequence[str]) -> Html | None:
    """Median TTFT against prompt length, both logarithmic, of the points of one concurrency;
    pairs' floors dotted. None where there is nothing to draw. `paths` fixes the colours."""
    values = [v for p in points for v in (p.median_ttft_ms, p.pd_floor_ms) if v]
    if not values:
        return None
    lengths = sorted({p.pd_input_len for p in points})
    x = Scale(lengths[0] / 1.15, lengths[-1] * 1.15, _LEFT, _RIGHT)
    y = Scale(min(values) / 1.25, max(values) * 1.25, _BOTTOM, _TOP)
    lines = [
        _path(number, [p for p in points if p.pd_path == path], x, y)
        for number, path in enumerate(paths)
    ]
    return tag(
        "svg",
        *_frame(lengths, x, y),
        *lines,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label="median time to the first token against prompt length; "
        "the table below has the same figures",
    )


def key(number: int, label: str, *, floor: bool = False) -> Html:
    """One entry of a legend."""
    line = tag("line", x1=1, x2=31, y1=8, y2=8, class_="floor" if floor else "line")
    mark = joined() if floor else _marker(number, 16, 8, doubtful=False)
    picture = tag("svg", line, mark, viewBox="0 0 32 16", class_=colour(number), aria_hidden="true")
    return tag("li", picture, label)


def waterfall(points: Sequence[Point]) -> Html:
    """One pair: a bar per place, its phases end to end, what is left of the TTFT behind them."""
    longest = max(max(p.median_ttft_ms or 0.0, sum(p.pd_phases.values())) for p in points)
    per_ms = (_BAR_RIGHT - _BAR_LEFT) / longest if longest > 0 else 0.0
    rows = [_bar(p, row * _ROW, per_ms) for row, p in enumerate(points)]
    return tag(
        "svg",
        *rows,
        viewBox=f"0 0 {_WIDTH} {_ROW * len(points)}",
        role="img",
        aria_label="phases of a handoff, one after the other; the table below has the figures",
    )


def phase_key(name: str) -> Html:
    swatch = tag("rect", width=16, height=16, rx=3, class_=f"phase {name}")
    picture = tag("svg", swatch, viewBox="0 0 16 16", aria_hidden="true", class_="swatch")
    return tag("li", picture, name.replace("_", " "))


def rest_ms(p: Point) -> float:
    """Of the median TTFT what no phase accounts for: router, HTTP, means against medians."""
    return max(0.0, (p.median_ttft_ms or 0.0) - sum(p.pd_phases.values()))


def _bar(p: Point, top: int, per_ms: float) -> Html:
    spans = [(name, p.pd_phases[name]) for name in PHASES if name in p.pd_phases]
    left, drawn = float(_BAR_LEFT), []
    for name, ms in [*spans, ("rest", rest_ms(p))]:
        title = tag("title", f"{name.replace('_', ' ')}: {ms:.1f} ms")
        shape = {"x": round(left, 1), "y": top + 6, "width": round(ms * per_ms, 1)}
        drawn.append(tag("rect", title, **shape, height=_ROW - 12, class_=f"phase {name}"))
        left += ms * per_ms
    middle = top + _ROW / 2 + 4
    label = tag("text", f"{p.pd_input_len}", x=_BAR_LEFT - 8, y=middle, text_anchor="end")
    total = "–" if p.median_ttft_ms is None else f"{p.median_ttft_ms:.1f} ms"
    shown = tag("text", total, x=_WIDTH - 2, y=middle, text_anchor="end", class_="strong")
    return joined(label, *drawn, shown)


def _path(number: int, points: Sequence[Point], x: Scale, y: Scale) -> Html:
    floor = _line(points, x, y, lambda p: p.pd_floor_ms, "floor")
    line = _line(points, x, y, lambda p: p.median_ttft_ms, "line")
    marks = [
        tag("g", _title(p), _marker(number, *spot, doubtful=bool(p.pd_marks)))
        for p in points
        if p.median_ttft_ms
        for spot in [(x.at(p.pd_input_len), y.at(p.median_ttft_ms))]
    ]
    return tag("g", floor, line, *marks, class_=colour(number))


def _line(
    points: Sequence[Point],
    x: Scale,
    y: Scale,
    figure: Callable[[Point], float | None],
    kind: str,
) -> Html:
    ordered = sorted(points, key=lambda p: p.pd_input_len)
    spots = [(x.at(p.pd_input_len), y.at(v)) for p in ordered if (v := figure(p))]
    if len(spots) == 1 and kind == "floor":
        (left, top) = spots[0]
        spots = [(left - 14, top), (left + 14, top)]
    return tag("polyline", points=" ".join(f"{a},{b}" for a, b in spots), class_=kind)


def _title(p: Point) -> Html:
    doubt = ", doubtful" if p.pd_marks else ""
    floor = "" if p.pd_floor_ms is None else f", floor {p.pd_floor_ms:.1f} ms"
    text = f"{p.pd_path} at {p.pd_input_len} tokens: {p.median_ttft_ms:.1f} ms{floor}{doubt}"
    return tag("title", text)


def _marker(number: int, x: float, y: float, *, doubtful: bool) -> Html:
    """Circle, square, diamond, triangle by turns; hollow where the figure is doubtful."""
    kind, r = "dot hollow" if doubtful else "dot", _RADIUS
    shape = number % 4
    if shape == 0:
        return tag("circle", cx=x, cy=y, r=r, class_=kind)
    outlines = {
        1: ((-r, -r), (r, -r), (r, r), (-r, r)),
        2: ((0, -r - 1.5), (r + 1.5, 0), (0, r + 1.5), (-r - 1.5, 0)),
        3: ((0, -r - 1), (r + 1, r), (-r - 1, r)),
    }
    corners = " ".join(f"{round(x + a, 1)},{round(y + b, 1)}" for a, b in outlines[shape])
    return tag("polygon", points=corners, class_=kind)


def _frame(lengths: Sequence[int], x: Scale, y: Scale) -> Iterator[Html]:
    for value in _ticks(y.low, y.high):
        level = y.at(value)
        yield tag("line", x1=_LEFT, x2=_RIGHT, y1=level, y2=level, class_="grid")
        yield tag("text", f"{value:g}", x=_LEFT - 6, y=level + 4, text_anchor="end")
    taken = -math.inf
    for length in lengths:
        place = x.at(length)
        yield tag("line", x1=place, x2=place, y1=_BOTTOM, y2=_BOTTOM + 4, class_="tick")
        if place - taken >= _LABEL_GAP:
            yield tag("text", f"{length}", x=place, y=_BOTTOM + 17, text_anchor="middle")
            taken = place
    yield tag("line", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM, class_="tick")
    middle = (_LEFT + _RIGHT) / 2
    yield tag("text", "prompt tokens", x=middle, y=_HEIGHT - 6, text_anchor="middle")
    yield tag("text", "ms", x=_LEFT + 2, y=_TOP - 2)


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 in each decade between the bounds; powers of ten alone over many decades."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 5 else (1,)
    found = [step * 10.0**decade for decade in decades for step in steps]
    return [value for value in found if low <= value <= high]
