"""The report as a browser shows it: offline, escaped, on every screen."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import browser
import msgspec
import pytest
from browser import Browser
from runtime.bench.bench_points import RUN, cells, good, sample, turn

from pdctl.runtime.bench.marks import MEANINGS, Mark
from pdctl.runtime.bench.markup import Html, tag
from pdctl.runtime.bench.page import page
from pdctl.runtime.bench.plots import Scale, ttft_plot
from pdctl.runtime.bench.summary import Point

PICTURES_ENV = "PDCTL_TEST_PICTURES"
"""A folder that screenshots are kept in."""

HOSTILE = "</style><script>window.owned=1</script><img src=x onerror='window.owned=1'>\"&"
BESIDE = """(() => {
  const ends = (words, side) => [...document.querySelectorAll(words)].map(
    (found) => found.getBoundingClientRect()[side])
  const bars = ends("svg[aria-label^=phases] rect", "right")
  return Math.max(...bars) < Math.min(...ends("svg[aria-label^=phases] .strong", "left"))
})()"""
"""No figure of a waterfall lies over a bar."""
needs_chromium = pytest.mark.skipif(browser.found() is None, reason="needs Chromium")


class Tags(HTMLParser):
    """Which elements a text has, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))

    def count(self, name: str) -> int:
        return sum(found == name for found, _ in self.found)


def swept(**changes: object) -> tuple[Point, ...]:
    """Two paths at three lengths, TTFT in proportion."""
    return tuple(
        msgspec.structs.replace(
            p,
            pd_input_len=tokens,
            median_ttft_ms=(p.median_ttft_ms or 0) * tokens / 66,
            pd_floor_ms=None if p.pd_floor_ms is None else p.pd_floor_ms * tokens / 66,
            **changes,
        )
        for tokens in (66, 700, 2844)
        for p in good()
    )


def test_how_it_was_measured_reads_as_prose() -> None:
    """Names of options as code, and no size in bytes."""
    run = msgspec.structs.replace(
        RUN, method="sends `n` at once", machine={"memory_bytes": 3 << 30}
    )
    text = page(run, good())
    assert "sends <code>n</code> at once" in text
    assert "<dt>memory</dt><dd>3.0 GiB</dd>" in text


def test_nothing_is_fetched_and_only_its_own_style_is_allowed() -> None:
    text = page(RUN, swept())
    tags = Tags(text)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(n for n, _ in tags.found)
    assert not [a for _, a in tags.found if {"src", "href", "style"} & a.keys()]
    policies = [a["content"] for _, a in tags.found if a.get("http-equiv")]
    assert len(policies) == 1
    assert str(policies[0]).startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in str(policies[0])


def test_what_comes_from_outside_is_text() -> None:
    mark = Mark(kind="errors", detail=HOSTILE)
    points = swept(pd_path=HOSTILE, pd_marks=(mark,))
    run = msgspec.structs.replace(
        RUN, cluster=HOSTILE, model=HOSTILE, versions={HOSTILE: HOSTILE}, machine={"x": HOSTILE}
    )
    tags = Tags(page(run, points))
    assert (tags.count("script"), tags.count("img"), tags.count("style")) == (0, 0, 1)
    assert not [a for _, a in tags.found if "onerror" in a]


def test_a_string_is_escaped_and_markup_is_not() -> None:
    assert tag("p", "a<b", tag("b", "&"), title='"') == '<p title="&quot;">a&lt;b<b>&amp;</b></p>'
    assert isinstance(tag("p"), Html)


def test_every_mark_is_explained_and_its_cell_shown() -> None:
    _, pair = cells([turn(sample(), pair=False)], [turn(sample("x"), steal=0.5)])
    text = page(RUN, (pair,))
    for kind in ("text", "steal"):
        assert MEANINGS[kind] in text.replace("&#x27;", "'")
    assert '<td class="doubt">1000.0†</td>' in text
    assert "p0&gt;d0 at 66 tokens: text differs from d0's in 1 of 1 requests" in text


def test_a_clean_sweep_says_so() -> None:
    assert "Nothing: every answer came" in page(RUN, good())


def test_a_verdict_has_a_row_per_pair_and_says_where_it_is_sooner() -> None:
    text = page(RUN, swept())
    assert "The first token is sooner in 0 of 3 cells; at best × 1.50" in text
    assert '<td class="left">p0&gt;d0</td><td>d0</td><td><span>× 1.50</span></td>' in text
    alone, pair = good()
    quick = msgspec.structs.replace(pair, median_ttft_ms=500.0)
    text = page(RUN, (alone, quick))
    assert "sooner in 1 of 1 cells; at best × 0.50, p0&gt;d0 at 66 tokens" in text
    assert '<span class="sooner">× 0.50</span>' in text


def test_a_doubtful_ratio_is_marked_and_never_called_sooner() -> None:
    alone, pair = good()
    mark = Mark(kind="text", detail="x")
    doubtful = msgspec.structs.replace(pair, median_ttft_ms=500.0, pd_marks=(mark,))
    assert '<td class="doubt">× 0.50†</td>' in page(RUN, (alone, doubtful))


def test_more_paths_than_colours_have_a_plot_per_decode_replica() -> None:
    """With its baseline and every pair into it, so that lines can be told apart."""
    alone, pair = good()
    points = [msgspec.structs.replace(alone, pd_path=name) for name in ("o0", "o1", "o2")]
    points += [
        msgspec.structs.replace(pair, pd_path=f"p{p}>d{d}", pd_baseline=f"o{d}")
        for p in range(2)
        for d in range(3)
    ]
    text = page(RUN, points)
    titles = [f"<h3>Into d{d}, one request at a time</h3>" for d in range(3)]
    assert [title for title in titles if title not in text] == []
    assert "Median TTFT, one" not in text
    assert text.count("p1&gt;d2: floor</li>") == 1
    assert text.count("</svg>o1</li>") == 1


def test_the_plot_has_a_line_per_path_and_a_dotted_floor_per_pair() -> None:
    points = swept()
    tags = Tags(ttft_plot(points, ["d0", "p0>d0"]) or "")
    lines = [a["class"] for name, a in tags.found if name == "polyline"]
    assert lines == ["floor", "line", "floor", "line"]
    drawn = [a["points"] for name, a in tags.found if name == "polyline"]
    assert [len(str(text).split()) for text in drawn] == [0, 3, 3, 3]


def test_a_doubtful_figure_has_a_hollow_marker() -> None:
    plot = ttft_plot(swept(pd_marks=(Mark(kind="steal", detail="x"),)), ["d0", "p0>d0"]) or ""
    assert plot.count("dot hollow") == 6


def test_without_a_figure_there_is_no_plot_and_the_page_still_opens() -> None:
    points = tuple(
        msgspec.structs.replace(p, median_ttft_ms=None, pd_floor_ms=None) for p in good()
    )
    assert ttft_plot(points, ["d0", "p0>d0"]) is None
    assert "Every point" in page(RUN, points)


def test_a_logarithmic_scale_puts_equal_ratios_equally_far_apart() -> None:
    scale = Scale(1, 100, 0, 200)
    assert [scale.at(value) for value in (1, 10, 100)] == [0, 100, 200]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def chromium() -> AsyncIterator[Browser]:
    async with browser.started() as running:
        yield running


@needs_chromium
@pytest.mark.anyio
@pytest.mark.parametrize(("width", "dark"), [(360, False), (360, True), (1280, False)])
async def test_it_opens_from_a_file_and_fits_the_screen(
    chromium: Browser, tmp_path: Path, width: int, dark: bool
) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(RUN, swept()), encoding="utf-8")
    async with chromium.tab() as tab:
        await tab.size(width, 900, dark=dark)
        await tab.open(file.as_uri())
        assert await tab.value("document.documentElement.scrollWidth") <= width
        assert await tab.value("getComputedStyle(document.body).maxWidth") != "none"
        assert "p0>d0: floor" in await tab.text()
        assert await tab.value(BESIDE)
        assert tab.logged == []
        if folder := os.environ.get(PICTURES_ENV):
            shade = "dark" if dark else "light"
            await tab.picture(Path(folder) / f"bench-{width}-{shade}.png")


@needs_chromium
@pytest.mark.anyio
async def test_no_text_from_outside_runs(chromium: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    marks = (Mark(kind="errors", detail=HOSTILE),)
    run = msgspec.structs.replace(RUN, cluster=HOSTILE)
    file.write_text(page(run, swept(pd_path=HOSTILE, pd_marks=marks)), encoding="utf-8")
    async with chromium.tab() as tab:
        await tab.open(file.as_uri())
        assert await tab.value("window.owned") is None
        assert HOSTILE in await tab.text()
