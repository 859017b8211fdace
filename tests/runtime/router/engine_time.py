"""Time as a router measures its engines by it: it passes where one of them computes, and next to
none passes elsewhere, however busy the machine is."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from runtime.router.fakes import Answer, FakeEngine, answers

from pdctl.runtime.router import calibration, judge, timed

READING_S = 1e-5
"""From one look at the clock to the next."""


class EngineTime:
    """One for all: nothing of it is left but what the hands show."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += READING_S
        return self.now_s

    def counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on the router's figures are of this time."""
        for module in (calibration, judge, timed):
            monkeypatch.setattr(module, "monotonic_s", self)


TIME = EngineTime()


def computes(seconds: float, then: Answer = answers) -> Answer:
    """As an engine that needs so long for its first token."""

    async def answer(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        TIME.now_s += seconds
        return await then(engine, request, body)

    return answer
