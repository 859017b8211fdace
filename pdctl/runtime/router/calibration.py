"""Prompts of a few lengths through a path before it takes traffic, so that the first requests
are decided by what was measured. Part of the canary's turn: its replicas do nothing else.

Nothing is measured twice: a path whose costs were stored, by the same engines with the same
options, has them already.
"""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from pdctl.runtime.cost.lengths import TRIAL
from pdctl.runtime.router.canary import Canary, Ledger
from pdctl.runtime.router.endpoints import COMPLETIONS
from pdctl.runtime.router.failure import RequestFailed
from pdctl.runtime.router.judge import Judge
from pdctl.runtime.router.members import Roster, Verdict
from pdctl.runtime.router.policy import SERVES_ALONE, Path
from pdctl.runtime.router.purpose import Purpose
from pdctl.runtime.router.relay import Relay
from pdctl.runtime.router.request import Ask
from pdctl.trace import monotonic_s

log = logging.getLogger("pdctl.router")

LENGTHS = (48, 192, 768, 1536)
"""Prompt tokens, about; as far as the context and the budget go."""
TIMES = 2
"""Per length; after one that warms the engine up."""
BUDGET_S = 6.0
"""Per path, for all its lengths: a length that would not fit is left out."""
OUTPUT_TOKENS = 6
"""Of the shortest prompt: what shows a decode step. Others ask for two."""
ENOUGH = 2
"""Lengths of which a path that was measured before needs no more."""
TIMEOUT_S = 60.0

WORDS = (
    "water stone river letter garden window morning paper winter summer north silver bread "
    "market travel engine number village bridge forest music question answer simple people "
    "country history science nature little green yellow seven twelve hundred second"
).split()


class Calibrated:
    """A canary, and the measuring that follows where it passed.

    Args:
        refresh: brings fresh counters into the roster, bounded.
        store: keeps what was measured; called before the path takes traffic.
    """

    def __init__(
        self,
        canary: Canary,
        relay: Relay,
        roster: Roster,
        refresh: Callable[[], Awaitable[bool]],
        store: Callable[[], Awaitable[None]],
    ) -> None:
        self._canary = canary
        self._store = store
        self._relay = relay
        self._roster = roster
        self._refresh = refresh

    async def judge(self, path: Path, incarnations: tuple[int, ...]) -> Verdict | None:
        """As the canary; a failed measurement is no failed canary."""
        verdict = await self._canary.judge(path, incarnations)
        if verdict is None or verdict.cause is not None or not self._judge.decides:
            return verdict
        for way in self._ways(path):
            try:
                await self._measure(way)
            except RequestFailed as failure:
                log.warning("not measured path=%s %s", way.text, failure.message)
        await self._store()
        if self._roster.incarnations(path) != incarnations or self._roster.closed_cause(path):
            return None
        return verdict

    @property
    def _judge(self) -> Judge:
        return self._relay.judge

    def _ways(self, path: Path) -> list[Path]:
        """The path, and its decode replica alone where that could answer instead."""
        engine = self._roster.plan.replica(path.decode).engine
        alone = Path(None, path.decode)
        return [alone, path] if path.prefill and engine in SERVES_ALONE else [path]

    async def _measure(self, path: Path) -> None:
        record = self._judge.book.record(path.text)
        curve = self._judge.book.curve(path.text)
        versions = self._judge.versions(path)
        if record and curve and len(curve.points) >= ENOUGH and record.versions == versions:
            return
        began_s = monotonic_s()
        longest = self._roster.plan.context_length - OUTPUT_TOKENS - 16
        await self._send(path, LENGTHS[0], Purpose.CANARY)
        for tokens in LENGTHS:
            for turn in range(TIMES):
                spent_s = monotonic_s() - began_s
                expected_s = self._judge.expected_s(path.text, tokens) or 0.0
                if tokens > longest or spent_s + expected_s > BUDGET_S:
                    return
                await self._send(path, tokens, Purpose.TRIAL, steps=turn == 0)

    async def _send(
        self, path: Path, tokens: int, purpose: Purpose, *, steps: bool = False
    ) -> None:
        outputs = OUTPUT_TOKENS if tokens == LENGTHS[0] and steps else 2
        ask = completion(self._roster.plan.model, self._prompt(tokens), outputs)
        ask = msgspec.structs.replace(ask, purpose=purpose)
        await self._relay.attempt(path, ask, Ledger(), timeout_s=TIMEOUT_S)
        if path.prefill is not None:
            await self._refresh()
            self._judge.look()

    def _prompt(self, tokens: int) -> str:
        """Words that no other prompt begins with, of about so many tokens."""
        words = [secrets.token_hex(4)]
        rng = random.Random(words[0])
        size = tokens * 100 // max(1, self._judge.lengths.estimate(TRIAL, 100))
        while sum(map(len, words)) + len(words) < size:
            words.append(rng.choice(WORDS))
        return " ".join(words)


def completion(model: str, prompt: str, tokens: int) -> Ask:
    """Streamed, past every prompt cache, to its whole length."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "pdctl_cache": False,
        "cache_salt": secrets.token_hex(8),
        "ignore_eos": True,
    }
    return Ask(endpoint=COMPLETIONS, body=body, stream=True)
