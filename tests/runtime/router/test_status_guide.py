"""docs/status.md against what `/status` answers and what `/metrics` prints."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime.router.cluster import CHAT, cluster
from runtime.router.fakes import fails, stalls_then

from pdctl.handoff.counters import PHASES

GUIDE = (Path(__file__).parents[3] / "docs" / "status.md").read_text()
BY_NAME = ("failures", "phases", "queued_tokens", "expected_ms")
"""Whose keys are causes and phases, or replicas and paths."""

pytestmark = pytest.mark.anyio


def keys(found: Any) -> Iterator[str]:
    """Of an answer, at every depth."""
    if isinstance(found, list):
        for each in found:
            yield from keys(each)
    elif isinstance(found, dict):
        for key, value in found.items():
            yield key
            if not (key in BY_NAME and isinstance(value, dict)):
                yield from keys(value)


async def test_the_guide_names_every_key_of_status() -> None:
    """Of a cluster with a request in flight and one that failed."""
    async with cluster("p0 d0 o0") as c:
        c["d0"].on["decode"] = fails(502, "gone", "peer_lost")
        assert (await c.ask(CHAT)).status == 502
        c["d0"].on["decode"] = stalls_then()
        waiting = asyncio.ensure_future(c.ask(CHAT))
        await c["d0"].stalled.wait()
        status = await (await c.http.get(c.url("/status"))).json()
        c["d0"].release.set()
        assert (await waiting).status == 200
    assert {"handoffs", "failures", "idle_s", "hint", "imported_tokens"} <= set(keys(status))
    assert {key for key in keys(status) if not re.search(rf"`{key}(\[\])?`", GUIDE)} == set()
    assert {phase for phase in PHASES if f"| `{phase}` |" not in GUIDE} == set()


async def test_the_guide_names_every_metric_that_is_no_counter_of_a_replica() -> None:
    """The others are the counters with the prefix."""
    async with cluster("p0 d0") as c:
        text = await (await c.http.get(c.url("/metrics"))).text()
    kinds = dict(re.findall(r"^# TYPE (pdctl_\w+) (\w+)$", text, re.MULTILINE))
    own = {name for name in kinds if not name.startswith("pdctl_pair_")}
    counters = {name for name in own if f"`{name.removeprefix('pdctl_')}`" in GUIDE}
    created = {name for name in own if name.endswith("_created")}
    assert {name for name in own - counters - created if f"`{name}`" not in GUIDE} == set()
