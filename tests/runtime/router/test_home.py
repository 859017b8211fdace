"""The status page's answer: what a browser is told that it may do with it."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from runtime.router.cluster import MODEL, cluster

from pdctl.runtime.router import endpoints
from pdctl.runtime.router.home import home, policy_of

pytestmark = pytest.mark.anyio

PAGE = home().html


def part(kind: str) -> str:
    (found,) = re.findall(rf"<{kind}>(.*?)</{kind}>", PAGE, re.DOTALL)
    return found


def test_the_policy_allows_the_pages_own_style_and_script_alone() -> None:
    """By their digests, so that whatever else gets in does not run."""
    policy = dict(
        rule.split(" ", 1) for rule in home().headers["Content-Security-Policy"].split("; ")
    )
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(part(kind).encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    assert policy["frame-ancestors"] == "'none'"
    assert policy_of(PAGE.replace("poll();", "")) != policy_of(PAGE)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    """No address of another host, no file beside it, no way to write markup or run text."""
    addresses = set(re.findall(r"https?://[\w./]+", PAGE))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\bsrc=|<link|@import|url\(|<iframe| style=| on\w+=", PAGE)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", PAGE)
    assert "localStorage" not in PAGE
    assert "document.cookie" not in PAGE


def test_what_the_page_links_to_exists() -> None:
    """R70: relative, so that it works behind a proxy that adds a prefix."""
    routes = {value for value in vars(endpoints).values() if isinstance(value, str)}
    asked = re.findall(r'href="([^"]+)"', PAGE) + re.findall(r'fetch\("([^"]+)"', PAGE)
    assert asked.count("status") == 3
    assert {f"/{path}" for path in asked} <= routes


def test_everything_has_a_name_for_those_who_do_not_see_it() -> None:
    """A language, a title, one first heading, a name per section and field, news as status and
    alert."""
    assert '<html lang="en">' in PAGE
    assert "<title>" in PAGE
    assert PAGE.count("<h1") == 1
    for section in re.findall(r"<section[^>]*>", PAGE):
        (name,) = re.findall(r'aria-labelledby="([^"]+)"', section)
        assert f'<h2 id="{name}">' in PAGE
    assert '<label for="key">' in PAGE
    assert 'role="status"' in PAGE
    assert 'role="alert"' in PAGE


async def test_the_page_is_the_same_for_everybody() -> None:
    """With a key or without, it names nothing of the cluster; it is not kept unasked."""
    async with cluster("o0", api_key="s3cret") as c:
        answer = await c.http.get(c.url("/"))
        text = await answer.text()
        assert (answer.status, answer.content_type) == (200, "text/html")
        assert text == PAGE
        assert not {"o0", MODEL, "s3cret"} & set(re.findall(r"\w+", text))
        for name, value in home().headers.items():
            assert answer.headers[name] == value
        assert answer.headers["Cache-Control"] == "no-cache"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
