"""A request that moves on while no leg says anything, as its two ends tell."""

from __future__ import annotations

import asyncio

import pytest
from runtime.router.cluster import CHAT, cluster
from runtime.router.fakes import answers

from pdctl.handoff.counters import Counters

pytestmark = pytest.mark.anyio

TIMEOUT_S = 0.5
TURN_S = 0.05
FOR_EVER = 1000
"""Turns."""


def moves(*idle_s: float, counter: str = "rooms"):
    """A decode leg that answers after that many turns; meanwhile its replica tells these seconds
    since the room's last progress."""

    async def leg(engine, request, body):
        for told in idle_s:
            engine.counters = Counters(**{counter: {body["pdctl"]["room"]: told}})
            await asyncio.sleep(TURN_S)
        engine.counters = Counters()
        return await answers(engine, request, body)

    return leg


@pytest.mark.parametrize("counter", ["rooms", "decoding"])
async def test_it_renews_the_deadline(counter: str) -> None:
    """R5: slower than the deadline in all, yet every report is of recent progress: of the
    handoff, or of a token in an answer that is not streamed."""
    async with cluster(timeout_s=TIMEOUT_S) as c:
        told = [0.01 + turn * 1e-4 for turn in range(round(3 * TIMEOUT_S / TURN_S))]
        c["d0"].on["decode"] = moves(*told, counter=counter)
        assert (await c.ask(CHAT)).status == 200


@pytest.mark.parametrize(
    "idle_s",
    [(TIMEOUT_S,) * FOR_EVER, (0.01,) * FOR_EVER],
    ids=["no progress for that long", "a replica that does not answer any more"],
)
async def test_it_ends_where_nothing_moves(idle_s: tuple[float, ...]) -> None:
    """R6: the same number again is an old report, not progress."""
    async with cluster(timeout_s=TIMEOUT_S) as c:
        c["d0"].on["decode"] = moves(*idle_s)
        answer = await c.ask(CHAT)
        assert (answer.status, (await answer.json())["error"]["code"]) == (504, "deadline")
