"""Five hundred of the fuzzed requests; `python tests/fuzz/http_bodies.py` sends 100,000."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest
from fuzz.http_bodies import run
from fuzz.requests import request
from runtime.router.cluster import cluster, eventually

COUNT = 500


def test_fuzzed_requests_are_answered_or_hung_up_on() -> None:
    """No 5xx, no hang, no traceback in the router's log, every error an error object, and
    descriptors that come back."""
    result = asyncio.run(run(COUNT, seed=20, url=None))
    assert result["wrong"] == []
    sent, statuses = result["sent"], result["statuses"]
    assert isinstance(sent, dict)
    assert isinstance(statuses, dict)
    assert sum(sent.values()) == sum(statuses.values()) == COUNT
    assert len(sent) == 7
    assert {"200", "400", "404"} <= set(statuses)


@pytest.mark.anyio
async def test_a_client_that_leaves_before_its_100_continue_is_no_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log has no traceback of it."""
    raw = request("POST", "/v1/completions", b"", {"expect": b"100-continue"})
    async with cluster("o0") as c:
        url = urlsplit(c.router.url)
        for _ in range(20):
            _, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(raw)
            writer.transport.abort()
        await eventually(lambda: c.router.meter.active == 0)
        assert (await c.http.get(c.url("/health"))).status == 200
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.anyio
async def test_an_unknown_expectation_is_ignored() -> None:
    """Also one whose bytes are no text: aiohttp's own answer to it would be a 500."""
    body = {"model": "tiny", "prompt": "hi"}
    async with cluster("o0") as c:
        for expected in ("200-ok", "\udcff"):
            url, headers = c.url("/v1/completions"), {"Expect": expected}
            async with c.http.post(url, json=body, headers=headers) as answer:
                assert answer.status == 200
