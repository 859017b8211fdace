"""The report as one HTML file that opens offline: no script, no outside asset, no colour alone."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from pdctl.handoff.counters import PHASES
from pdctl.runtime.bench.marks import MEANINGS
from pdctl.runtime.bench.markup import Html, joined, tag
from pdctl.runtime.bench.plots import COLOURS, key, phase_key, rest_ms, ttft_plot, waterfall
from pdctl.runtime.bench.report import (
    ABSENT,
    MARKED,
    details,
    goodput_lines,
    links,
    matrix,
    remarks,
)
from pdctl.runtime.bench.summary import Point, Run
from pdctl.topology.sizes import approximate_size

STYLE = "page.css"

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
{title}
<style>{style}</style>
</head>
<body>
"""


def page(run: Run, points: Sequence[Point]) -> str:
    """The whole file. What came from the cluster (names, errors, versions) is escaped."""
    style = files("pdctl.runtime.bench").joinpath(STYLE).read_text("utf-8")
    head = _HEAD.format(
        policy=_policy(style), title=tag("title", f"{run.cluster}: bench {run.date}"), style=style
    )
    shown = joined(
        _heading(run),
        _section("Does splitting pay?", _verdicts(points)),
        _section("Time to the first token", _plots(points)),
        _section("Where a handoff's time goes", _waterfalls(points)),
        _section("Median TTFT in milliseconds", _card(_table(*matrix(points)))),
        _section("Every point", _every(points)),
        _section("What is doubtful", _doubts(points)),
        _section("How it was measured", _method(run, points)),
    )
    return f"{head}{tag('main', shown)}\n</body>\n</html>\n"


def _policy(style: str) -> str:
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _heading(run: Run) -> Html:
    about = (
        f"{run.model} · {_moment(run.date)} · {run.output_len} output tokens · {run.rounds} rounds"
    )
    return tag("header", tag("h1", run.cluster), tag("p", about, class_="faint"))


def _moment(date: str) -> str:
    """ "20260102-030405" for people."""
    return f"{date[:4]}-{date[4:6]}-{date[6:8]} {date[9:11]}:{date[11:13]}"


def _section(title: str, content: Html) -> Html:
    return tag("section", tag("h2", title), content) if content else joined()


def _card(*content: Html, row: bool = False) -> Html:
    return tag("div", *content, class_="card row" if row else "card")


def _paths(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(p.pd_path for p in points))


def _lanes(points: Sequence[Point]) -> list[int]:
    return list(dict.fromkeys(p.pd_concurrency for p in points))


def _at_once(lanes: int) -> str:
    return "one request at a time" if lanes == 1 else f"{lanes} requests at once"


def _verdicts(points: Sequence[Point]) -> Html:
    cards = [_verdict([p for p in points if p.pd_concurrency == n], n) for n in _lanes(points)]
    return joined(*(card for card in cards if card))


def _verdict(points: Sequence[Point], lanes: int) -> Html:
    """A row per pair: its TTFT over that of its decode engine alone, by prompt length."""
    cells = {(p.pd_path, p.pd_input_len): p for p in points}
    lengths = list(dict.fromkeys(p.pd_input_len for p in points))
    compared = {
        (p.pd_path, p.pd_input_len): (p, other, p.median_ttft_ms / other.median_ttft_ms)
        for p in points
        if (other := cells.get((p.pd_baseline or "", p.pd_input_len)))
        and p.median_ttft_ms
        and other.median_ttft_ms
    }
    pairs = {p.pd_path: other.pd_path for p, other, _ in compared.values()}
    if not pairs:
        return joined()
    rows = [
        [path, local, *(_ratio(*compared.get((path, n), ())) for n in lengths)]
        for path, local in pairs.items()
    ]
    best = min((ratio, p.pd_path, p.pd_input_len) for p, _, ratio in compared.values())
    sooner = sum(_is_sooner(ratio) for *_, ratio in compared.values())
    said = (
        f"The first token is sooner in {sooner} of {len(compared)} cells; at best × {best[0]:.2f}, "
        f"{best[1]} at {best[2]} tokens. × 0.50 is half the time that decode takes alone."
    )
    headers = ["pair", "against", *map(str, lengths)]
    title = tag(
        "h3", f"Its first token against decode's alone, by prompt tokens, {_at_once(lanes)}"
    )
    return _card(title, tag("p", said), _table(headers, rows, left="pair"), row=True)


def _is_sooner(ratio: float) -> bool:
    """As it is shown: a ratio that reads 1.00 is no gain."""
    return round(ratio, 2) < 1


def _ratio(*found: Any) -> str:
    if not found:
        return ABSENT
    p, other, ratio = found
    if p.pd_marks or other.pd_marks:
        return f"× {ratio:.2f}{MARKED}"
    return tag("span", f"× {ratio:.2f}", **({"class_": "sooner"} if _is_sooner(ratio) else {}))


def _plots(points: Sequence[Point]) -> Html:
    cards = [
        _plot([p for p in points if p.pd_concurrency == n and p.pd_path in paths], title, paths)
        for n in _lanes(points)
        for title, paths in _groups(points, n)
    ]
    drawn = [card for card in cards if card]
    return tag("div", *drawn, class_="cards") if drawn else joined()


def _groups(points: Sequence[Point], lanes: int) -> list[tuple[str, list[str]]]:
    """Titles and paths of plots: one of all paths, or, where those are more than there are
    colours, one per decode replica, with its baseline and every pair into it."""
    paths = _paths(points)
    if len(paths) <= COLOURS:
        return [(f"Median TTFT, {_at_once(lanes)}", paths)]
    groups: dict[str, list[str]] = {}
    for p in points:
        _, _, decode = p.pd_path.partition(">")
        if decode:
            group = groups.setdefault(decode, [p.pd_baseline] if p.pd_baseline in paths else [])
            if p.pd_path not in group:
                group.append(p.pd_path)
    return [(f"Into {name}, {_at_once(lanes)}", group) for name, group in groups.items()]


def _plot(points: Sequence[Point], title: str, paths: Sequence[str]) -> Html:
    drawn = ttft_plot(points, paths)
    if drawn is None:
        return joined()
    floors = {p.pd_path for p in points if p.pd_floor_ms is not None}
    keys: list[Html] = []
    for number, path in enumerate(paths):
        keys.append(key(number, path))
        if path in floors:
            keys.append(key(number, f"{path}: floor", floor=True))
    return _card(
        tag("h3", title),
        tag("div", drawn, class_="plot"),
        tag("ul", *keys, class_="keys"),
        tag(
            "p",
            "Both axes are logarithmic. A hollow marker is doubtful. A pair's floor is its prefill "
            "engine alone, or its bytes over its link, whichever takes longer.",
            class_="faint",
        ),
    )


def _waterfalls(points: Sequence[Point]) -> Html:
    pairs = [p for p in points if p.pd_phases]
    cards = [
        _waterfall([p for p in pairs if (p.pd_path, p.pd_concurrency) == cell])
        for cell in dict.fromkeys((p.pd_path, p.pd_concurrency) for p in pairs)
    ]
    return tag("div", *cards, class_="cards") if cards else joined()


def _waterfall(points: Sequence[Point]) -> Html:
    seen = [name for name in PHASES if any(name in p.pd_phases for p in points)]
    rows = [
        [
            str(p.pd_input_len),
            *(f"{p.pd_phases[name]:.1f}" if name in p.pd_phases else "–" for name in seen),
            f"{rest_ms(p):.1f}",
        ]
        for p in points
    ]
    names = [*seen, "rest"]
    return _card(
        tag("h3", f"{points[0].pd_path}, {_at_once(points[0].pd_concurrency)}"),
        tag("div", waterfall(points), class_="plot"),
        tag("ul", *(phase_key(name) for name in names), class_="keys"),
        _table(["tokens", *(name.replace("_", " ") for name in names)], rows),
        tag(
            "p",
            "Mean milliseconds by prompt tokens; the figure beside a bar is the median TTFT, and "
            "“rest” what of it no phase covers.",
            class_="faint",
        ),
    )


def _every(points: Sequence[Point]) -> Html:
    caption = "Medians; bytes and imported tokens per request. " + (
        f"{MARKED} marks a doubtful point, explained below."
        if any(p.pd_marks for p in points)
        else "No point is marked."
    )
    captions = [caption, *goodput_lines(points)]
    return _card(
        *(tag("p", text, class_="faint") for text in captions),
        _table(*details(points), left="path"),
    )


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], left: str = "") -> Html:
    column = headers.index(left) if left else -1
    head = tag("tr", *_cells("th", headers, column))
    body = [tag("tr", *_cells("td", row, column)) for row in rows]
    table = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("div", table, class_="scroll", tabindex=0, role="group", aria_label="table")


def _cells(kind: str, texts: Sequence[str], left: int) -> Iterator[Html]:
    for number, text in enumerate(texts):
        classes = ["left"] if number == left else []
        classes += ["doubt"] if kind == "td" and text.endswith(MARKED) else []
        attributes = {"class_": " ".join(classes)} if classes else {}
        yield tag(kind, text, **attributes)


def _doubts(points: Sequence[Point]) -> Html:
    kinds = list(dict.fromkeys(mark.kind for p in points for mark in p.pd_marks))
    lines = [line.removeprefix(f"{MARKED} ") for line in remarks(points)]
    if not lines:
        return _card(
            tag("p", "Nothing: every answer came, went its way, and moved what it had to.")
        )
    meanings = [
        tag("p", tag("span", kind, class_="badge"), f" {MEANINGS.get(kind, '')}") for kind in kinds
    ]
    return _card(
        tag("ul", *(tag("li", line) for line in lines), class_="list"),
        *meanings,
        tag("p", "A mark never changes a figure.", class_="faint"),
    )


def _with_code(text: str) -> list[str]:
    """Prose of which every other part stands between backticks."""
    return [tag("code", part) if n % 2 else part for n, part in enumerate(text.split("`"))]


def _method(run: Run, points: Sequence[Point]) -> Html:
    computes = {f"{name} computes in": dtype for name, dtype in run.compute_dtypes.items()}
    carry = {f"link of {paths}": words for paths, words in links(points).items()}
    machine = {
        name.removesuffix("_bytes"): approximate_size(value) if name.endswith("_bytes") else value
        for name, value in run.machine.items()
    }
    described = {**machine, **run.versions, **computes, **carry}
    entries = [
        tag("div", tag("dt", name.replace("_", " ")), tag("dd", str(value)))
        for name, value in described.items()
    ]
    return _card(tag("p", *_with_code(run.method)), tag("dl", *entries, class_="facts"))
