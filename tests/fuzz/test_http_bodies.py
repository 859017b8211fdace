"""Five hundred of the fuzzed requests; `python tests/fuzz/http_bodies.py` sends 100,000."""

from __future__ import annotations

import asyncio

import pytest
from fuzz.http_bodies import run
from runtime.router.cluster import cluster

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
async def test_an_unknown_expectation_is_ignored() -> None:
    """Also one whose bytes are no text: aiohttp's own answer to it would be a 500."""
    body = {"model": "tiny", "prompt": "hi"}
    async with cluster("o0") as c:
        for expected in ("200-ok", "\udcff"):
            url, headers = c.url("/v1/completions"), {"Expect": expected}
            async with c.http.post(url, json=body, headers=headers) as answer:
                assert answer.status == 200
