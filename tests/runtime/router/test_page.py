"""The status page in a real browser, over a real router with scripted engines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import browser
import msgspec
import pytest
from browser import Browser, Tab
from runtime.router.cluster import CHAT, Cluster, cluster, eventually
from runtime.router.fakes import FakeEngine, fails, stalls_then

from pdctl.handoff.counters import Counters, Histogram, PairCounters

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(browser.found() is None, reason="needs Chromium"),
]

PICTURES_ENV = "PDCTL_TEST_PICTURES"
"""A folder that screenshots are kept in."""

HOSTILE = "</script><img src=x onerror=\"window.owned=1\"><b>bold</b>' onload='window.owned=1"
SETTLED = "document.getElementById('said').textContent === 'Live.'"
NARROW, WIDE = 360, 1280
WAITS = """(() => {
  Date.now = () => 0, Math.random = () => %d
  return [1, 2, 3, 9].map((n) => { unheard = n - 1; lost(new Error("x")); return nextAt })
})()"""
"""Milliseconds to the next question, after so many without an answer; in one turn, so that no
answer of the page's own comes between."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def chromium() -> AsyncIterator[Browser]:
    async with browser.started() as running:
        yield running


@pytest.fixture
async def page(chromium: Browser) -> AsyncIterator[Tab]:
    """With nothing in its stores."""
    async with chromium.tab() as opened:
        await opened.size(WIDE, 900)
        yield opened


def spread(*seconds: float) -> Histogram:
    histogram = Histogram()
    for each in seconds:
        histogram = histogram.observed(each)
    return histogram


def busy(c: Cluster) -> None:
    """Counters as a pair has them that has served for a while."""
    sent = {
        "queue": spread(*[0.0004] * 900, *[0.04] * 40),
        "prefill": spread(*[0.2] * 300, *[0.7] * 500, *[3.0] * 90, *[9.0] * 4),
        "transfer": spread(*[0.03] * 500, *[0.08] * 90),
    }
    received = {"import": spread(*[0.004] * 70, 0.02), "first_token": spread(*[0.03] * 200, 0.4)}
    moved = PairCounters(
        handoffs_completed=1204, handoffs_failed=2, imported_tokens=884_211, host_bytes=31 << 30
    )
    c["p0"].counters = Counters(
        handoffs_completed=1204,
        prompt_tokens=901_377,
        buffer_bytes_used=188 << 20,
        waiters=1,
        pairs={"d0": msgspec.structs.replace(moved, phases=sent)},
    )
    c["d0"].counters = Counters(
        handoffs_completed=1204,
        output_tokens=143_020,
        pairs={"p0": msgspec.structs.replace(moved, phases=received, round_trip_s=0.00042)},
    )


async def kept(page: Tab, name: str) -> None:
    folder = os.environ.get(PICTURES_ENV)
    if folder is not None:
        await page.picture(Path(folder) / f"{name}.png")


async def fits(page: Tab) -> bool:
    """Nothing is cut off or has to be scrolled sideways."""
    return bool(await page.value("document.documentElement.scrollWidth <= innerWidth"))


async def test_the_page_shows_the_cluster_at_every_width(page: Tab) -> None:
    """Replicas, pairs with their phases, what is in flight and what failed; on a phone and on a
    desk, light and dark, nothing is wider than the screen and the console stays silent."""
    async with cluster("p0 d0 d1 o0") as c:
        busy(c)
        c["d1"].on["decode"] = fails(502, "d1 closed the connection", "peer_lost")
        assert (await c.ask(CHAT, x_pdctl_path="p0>d1")).status == 502
        c.keeper.set_state("d1", "backoff", "it was ended by SIGKILL")
        await eventually(lambda: len(c.router.roster.ready()) == 2)
        c["p0"].on["prefill"] = stalls_then()
        waiting = asyncio.ensure_future(c.ask(CHAT))
        await c["p0"].stalled.wait()
        await page.open(c.url("/"))
        await page.until(SETTLED)
        shown = await page.text()
        for part in (
            "tiny",
            "not every path is ready",
            "p0 → d0",
            "p0 → d1",
            "901,377",
            "31.0 GiB",
        ):
            assert part in shown
        assert "it was ended by SIGKILL" in shown
        assert "peer_lost" in shown
        assert "hint: pdctl ps test shows who is away" in shown
        assert "p0>d0\nstart\nfor" in shown.replace("\n\n", "\n")
        labels = "[...document.querySelectorAll('svg')].map((s) => s.getAttribute('aria-label'))"
        assert "transfer: 590 observed, median ≤ 50 ms, 95 % ≤ 100 ms" in await page.value(labels)
        for name, width, dark in (("phone", NARROW, True), ("desk", WIDE, False)):
            await page.size(width, 900, dark=dark)
            assert await fits(page)
            await kept(page, name)
        c["p0"].release.set()
        assert (await waiting).status == 200
        await page.until("poll(), document.body.innerText.includes('None.')")
        assert page.logged == []


async def test_only_what_is_wrong_is_in_the_colour_of_faults(page: Tab) -> None:
    """A canary that runs is not."""

    def hang(engines: dict[str, FakeEngine]) -> None:
        for engine in engines.values():
            engine.on["alone"] = stalls_then()

    async with cluster("p0 d0 o0", canaries=False, set_up=hang) as c:
        for name in ("d0", "o0"):
            await c[name].stalled.wait()
        await page.open(c.url("/"))
        await page.until(SETTLED)
        assert (await page.text()).count("its canary is running") == 2
        assert await page.value("document.querySelectorAll('.cause').length") == 0
        c.keeper.set_state("d0", "backoff", "it was ended by SIGKILL")
        await page.until("poll(), document.querySelector('.cause')?.innerText.includes('SIGKILL')")
        for engine in c.engines.values():
            engine.release.set()


async def test_counters_that_grow_say_how_fast(page: Tab) -> None:
    """From one answer to the next; a replica that restarted begins anew."""
    async with cluster("p0 d0") as c:
        c["d0"].counters = Counters(output_tokens=1000)
        await page.open(c.url("/"))
        await page.until(SETTLED)
        c["d0"].counters = Counters(output_tokens=1500)
        await page.until("poll(), /1,500 \\([\\d.,]+\\/s\\)/.test(document.body.innerText)")
        c["d0"].counters = Counters(output_tokens=7)
        await page.until("poll(), !document.body.innerText.includes('1,500')")
        assert "/s)" not in await page.text()


async def test_what_comes_from_outside_is_text(page: Tab) -> None:
    """A model name, a replica's cause and an engine's message that are markup stay words."""
    async with cluster("p0 d0 o0") as c:
        c["d0"].on["decode"] = fails(502, HOSTILE, "protocol")
        assert (await c.ask(CHAT)).status == 502
        c.keeper.set_state("o0", "failed", HOSTILE)
        c.router.roster.adopt(msgspec.structs.replace(c.router.roster.plan, model=HOSTILE))
        await eventually(lambda: len(c.router.roster.ready()) == 1)
        await page.open(c.url("/"))
        await page.until(SETTLED)
        assert (await page.text()).count(HOSTILE) == 3
        assert await page.value("document.querySelectorAll('img, b').length") == 0
        assert await page.value("document.querySelectorAll('script').length") == 1
        assert await page.value("window.owned === undefined")


ATTEMPTS = (
    "document.body.innerHTML = '<i>'",
    "document.body.setAttribute('onclick', 'window.owned = 1')",
    "document.head.append(Object.assign(document.createElement('script'), {text: 'owned = 1'}))",
)


async def test_the_policy_stops_what_was_not_in_the_page(page: Tab) -> None:
    """Even script that got in could write no markup, run no text, and reach no other host."""
    async with cluster("o0") as c:
        await page.open(c.url("/"))
        await page.until(SETTLED)
        for attempt in ATTEMPTS:
            tried = f"(() => {{ try {{ {attempt} }} catch {{ return 'refused' }} }})()"
            assert await page.value(tried) == "refused", attempt
        await page.value("fetch('http://127.0.0.2:9/').catch(() => window.told = 1)")
        await page.until("window.told === 1")
        assert await page.value("window.owned === undefined")
        assert any("violates the document's Content Security Policy" in s for s in page.logged)


async def test_the_key_is_asked_for_and_kept_in_the_tab(page: Tab) -> None:
    """R60: the page loads without it and shows nothing; a wrong key is refused and forgotten;
    the right one is typed and sent with the keyboard alone, and no cookie or lasting store has
    it."""
    async with cluster("o0", api_key="s3cret") as c:
        await page.open(c.url("/"))
        await page.until("document.activeElement.id === 'key'")
        assert "o0" not in await page.text()
        await page.type("wrong")
        await page.press("Enter")
        await page.until("document.body.innerText.includes('The router refused that key.')")
        assert await page.value("sessionStorage.length") == 0
        await kept(page, "key")
        await page.type("s3cret")
        await page.press("Tab")
        await page.press("Enter")
        await page.until(SETTLED)
        assert "o0" in await page.text()
        assert await page.value("Object.values(sessionStorage).join()") == "s3cret"
        assert await page.value("document.cookie + localStorage.length") == "0"


async def test_a_router_that_is_gone_is_said(page: Tab) -> None:
    """Since when, and of when the rest is; it is asked less and less often; the rest stays."""
    async with cluster("p0 d0") as c:
        await page.open(c.url("/"))
        await page.until(SETTLED)
        c.stop()
        await page.until("poll(), !document.getElementById('gone').hidden")
        shown = await page.text()
        assert "The router has not answered since" in shown
        assert "What is below was so at" in shown
        assert "p0 → d0" in shown
        assert await page.value("document.body.classList.contains('stale')")
        assert await page.value("document.title") == "router gone"
        await kept(page, "gone")
        for chance in (0, 1):
            first, second, third, last = await page.value(WAITS % chance)
            assert first < second < third < last < 36_001


async def test_a_silent_agent_is_said(page: Tab) -> None:
    """The router's last picture is shown as that."""
    async with cluster("p0 d0") as c:
        await c.keeper.stop()
        await page.open(c.url("/"))
        await page.until("document.body.innerText.includes('agent does not answer')")
        assert "p0 → d0" in await page.text()


async def test_a_hidden_tab_asks_nothing(page: Tab) -> None:
    """R64: no question is on its way or due while nobody looks; the next one is asked at once
    when somebody does."""
    async with cluster("p0 d0") as c:
        await page.open(c.url("/"))
        await page.until(SETTLED)
        hide = "Object.defineProperty(document, 'hidden', {configurable: true, value: %s})"
        turn = "document.dispatchEvent(new Event('visibilitychange'))"
        await page.value(f"{hide % 'true'}, {turn}, window.asked = 0")
        await page.value(
            "window.real = fetch, window.fetch = (...all) => (window.asked += 1, real(...all))"
        )
        await page.value("later(0), new Promise((done) => setTimeout(done, 0))")
        assert await page.value("window.asked") == 0
        await page.value(f"{hide % 'false'}, {turn}")
        await page.until("window.asked >= 1")
