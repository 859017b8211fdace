"""Prompts of a few lengths through a path before it takes traffic, so that the first requests
are decided by what was measured, and `pdctl plan` has figures. Part of the canary's turn: its
replicas do nothing else.

Where nothing is decided by it, it is brief: half a second per path, after what the canary's own
chat took. Nothing is measured twice: a path whose costs were stored, by the same engines with the
same options, has them already.
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
from pdctl.topology.model import PAGE_TOKENS
from pdctl.trace import monotonic_s

log = logging.getLogger("pdctl.router")

LENGTHS = (48, 192, 768, 1536)
"""Prompt tokens, about; as far as the context and the budget go."""
OUTPUT_TOKENS = 6
"""Of the shortest prompt: what shows a decode step. Others ask for two."""
ENOUGH = 2
"""Lengths of which a path that was measured before needs no more."""
CAUTION = 0.9
"""Of the longest prompt that is admitted: lengths are estimated."""


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    times: int
    """Per length."""
    budget_s: float
    """Per path, for all its lengths: a length that would not fit is left out."""
    warms: bool
    """Begins with one that warms the engine up."""


THOROUGH = Effort(times=2, budget_s=6.0, warms=True)
"""Where requests are decided by it."""
BRIEF = Effort(times=1, budget_s=0.5, warms=False)

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
        if verdict is None or verdict.cause is not None:
            return verdict
        effort = THOROUGH if self._judge.decides else BRIEF
        known_s = self._judge.expected_s(path.text, LENGTHS[0]) or 0.0
        for way in self._ways(path):
            try:
                await self._measure(way, effort, known_s)
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

    async def _measure(self, path: Path, effort: Effort, known_s: float) -> None:
        """`known_s`: what the shortest prompt should take, where nothing was measured of `path`."""
        if self._is_known(path, effort.times):
            return
        began_s = monotonic_s()
        if effort.warms:
            await self._send(path, LENGTHS[0], Purpose.CANARY)
        for tokens in (n for n in LENGTHS if n <= self._longest(path)):
            for turn in range(effort.times):
                spent_s = monotonic_s() - began_s
                expected_s = self._judge.expected_s(path.text, tokens) or known_s
                if spent_s + expected_s > effort.budget_s:
                    return
                await self._send(path, tokens, Purpose.TRIAL, steps=turn == 0)

    def _is_known(self, path: Path, times: int) -> bool:
        record = self._judge.book.record(path.text)
        curve = self._judge.book.curve(path.text)
        if record is None or curve is None or record.versions != self._judge.versions(path):
            return False
        return sum(point.count >= times for point in curve.points) >= ENOUGH

    def _longest(self, path: Path) -> int:
        """Tokens that the context and, of a pair, the page budget admit."""
        plan = self._roster.plan
        longest = plan.context_length
        if path.prefill and plan.buffer_bytes is not None and plan.page_bytes:
            longest = min(longest, plan.buffer_bytes // plan.page_bytes * PAGE_TOKENS)
        return int((longest - OUTPUT_TOKENS - 16) * CAUTION)

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
