"""When canaries run: one task per path, replicas one at a time, with back-off."""

from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import AsyncExitStack
from typing import Protocol

import anyio

from pdctl.runtime.router.members import Roster, Verdict
from pdctl.runtime.router.policy import Path

log = logging.getLogger("pdctl.router")

PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)


class Judging(Protocol):
    """Tries one path."""

    async def judge(self, path: Path, incarnations: tuple[int, ...]) -> Verdict | None:
        """A verdict for these incarnations; None when an end went away meanwhile."""
        ...


class Ward:
    """Keeps every path's verdict current while its replicas are ready."""

    def __init__(self, roster: Roster, canary: Judging) -> None:
        self._roster = roster
        self._canary = canary
        self._locks: dict[str, anyio.Lock] = defaultdict(anyio.Lock)

    async def run(self) -> None:
        """Keeps every path that the roster has, now and later; ends by cancellation."""
        kept: set[Path] = set()
        async with anyio.create_task_group() as tasks:
            while True:
                for path in self._roster.paths:
                    if path not in kept:
                        kept.add(path)
                        tasks.start_soon(self._keep, path, kept)
                await self._roster.changed()

    async def _keep(self, path: Path, kept: set[Path]) -> None:
        """Until the roster has the path no more."""
        failures = 0
        tried: tuple[int, ...] = ()
        while True:
            while path in self._roster.paths and not self._is_due(path):
                await self._roster.changed()
            if path not in self._roster.paths:
                kept.discard(path)
                return
            if tried != self._roster.incarnations(path):
                failures = 0
            tried = self._roster.incarnations(path)
            await self._run(path)
            verdict = self._roster.verdict(path)
            if verdict is not None and verdict.cause is not None:
                log.warning("canary failed path=%s cause=%s", path.text, verdict.cause)
                pause_s = PAUSES_S[min(failures, len(PAUSES_S) - 1)]
                failures += 1
                await self._rest(path, tried, pause_s)

    def _is_due(self, path: Path) -> bool:
        """Ready ends and no pass for their present incarnations; a failed one is due again."""
        if self._roster.closed_cause(path) is not None:
            return False
        verdict = self._roster.verdict(path)
        return verdict is None or verdict.cause is not None

    async def _run(self, path: Path) -> None:
        async with AsyncExitStack() as held:
            for name in sorted(path.replicas):
                await held.enter_async_context(self._locks[name])
            if not self._is_due(path):
                return
            incarnations = self._roster.begin_canary(path)
            verdict = None
            try:
                verdict = await self._canary.judge(path, incarnations)
            finally:
                self._roster.end_canary(path, verdict)
            if verdict is not None and verdict.cause is None:
                log.info("canary passed path=%s", path.text)

    async def _rest(self, path: Path, tried: tuple[int, ...], pause_s: float) -> None:
        """A pause that a new incarnation of either end cuts short."""
        with anyio.move_on_after(pause_s):
            while self._roster.incarnations(path) == tried:
                await self._roster.changed()
