"""A real generation through every path before it takes traffic, and what it must show.

A pair's canary sends one completion prefill → decode and compares the first tokens with what
one of the two engines computes alone, step by step, on the log probabilities of the ten most
likely tokens: the decode engine where it can serve alone, else the prefill engine. Where neither
can (SGLang → SGLang), prefill computes the same tokens one at a time: each handoff's first token
is prefill's own, of a prompt that is one token longer. Then a chat request goes the same way, so
that templates which the two engines render differently fail on the handoff's token digest. An
ordinary replica's canary is the same two requests without a comparison.

The bound. The decode engine's own rounding is in both answers; what is left is the pages' 16
bits and prefill's arithmetic. Measured with MLX on SmolLM2-135M and on nine random Llama,
Qwen2 and Qwen3 checkpoints, four prompts each, ten likeliest tokens: prefill in float16 moves
a log probability by at most 0.012, in bfloat16 by 0.13. KV that is zero, has K and V swapped,
or is rotated with another theta moves one by 1 or more; KV that arrives one token late by 0.14
or more (1.5 on SmolLM2). `BOUNDS` lies between, for each dtype.

Tokens whose K and V move together, within what is attended to, change nothing: RoPE is in K.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdctl.engines.interface import EngineSpec
from pdctl.engines.registry import spec_for
from pdctl.runtime.router.endpoints import CHAT_COMPLETIONS, COMPLETIONS
from pdctl.runtime.router.failure import RequestFailed
from pdctl.runtime.router.members import Roster, Verdict
from pdctl.runtime.router.policy import SERVES_ALONE, Path
from pdctl.runtime.router.purpose import Purpose
from pdctl.runtime.router.ranking import CanaryFailed, Step, difference, prompt_of, steps_of
from pdctl.runtime.router.relay import Relay
from pdctl.runtime.router.request import Ask
from pdctl.topology.model import ComputeDtype, Dtype
from pdctl.topology.plan import Plan

log = logging.getLogger("pdctl.router")

BOUNDS = {Dtype.FLOAT16: 0.12, Dtype.BFLOAT16: 0.5}
"""Largest difference of one token's log probability that rounding may explain (nats)."""

TOP = 10
TOKENS = 4
CHAT_TOKENS = 5
"""Enough to show a decode step."""
TIMEOUT_S = 120.0

PROMPT = (
    "In a small town by the sea there lived an old clock maker who repaired every watch that "
    "people brought to him. One winter morning a girl came with a silver watch that had "
    "stopped at seven minutes past nine, and she asked him whether time itself could be "
    "mended. He opened the case, looked at the tiny wheels, smiled and said that"
)
"""Over one page (64 tokens) with any tokenizer, so that a page boundary is crossed."""

QUESTION = "Name one colour."


class Ledger:
    """A delivery that keeps the answer, and prefill's own."""

    def __init__(self) -> None:
        self.body = b""
        self.prefilled_body = b""
        self.begun = False

    def decided(self, text: str) -> None:
        return

    def route(self, path: Path, room: int | None, retried: Path | None) -> None:
        return

    def recomputed(self, path: Path) -> None:
        return

    def prefilled(self, body: bytes) -> None:
        self.prefilled_body = body

    async def whole(self, body: bytes, content_type: str) -> None:
        self.body = body

    async def event(self, raw: bytes) -> None:
        self.body += raw

    async def end(self) -> None:
        return


def completion(
    model: str,
    ranking: Mapping[str, Any],
    prompt: str | list[int] = PROMPT,
    tokens: int = TOKENS,
) -> Ask:
    """Greedy, with log probabilities, past every prompt cache: a salt that is used once finds
    nothing in an engine's, and leaves nothing to be found."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "pdctl_cache": False,
        "cache_salt": secrets.token_hex(8),
        **ranking,
    }
    return Ask(endpoint=COMPLETIONS, body=body, stream=False, purpose=Purpose.CANARY)


def with_ranking(ask: Ask, ranking: Mapping[str, Any]) -> Ask:
    """The same, whose prefill leg ranks its one token too."""
    return msgspec.structs.replace(ask, prefill_fields=dict(ranking))


def chat(model: str) -> Ask:
    """Streamed, so that its time to the first token is seen: what came before has warmed the
    engines up, so it tells what a short prompt takes."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": CHAT_TOKENS,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "pdctl_cache": False,
        "cache_salt": secrets.token_hex(8),
    }
    return Ask(endpoint=CHAT_COMPLETIONS, body=body, stream=True, purpose=Purpose.TRIAL)


def bound_of(plan: Plan, path: Path) -> float:
    """The pages' bound, or bfloat16's where either end computes in it."""
    computed = {plan.replica(name).compute_dtype for name in path.replicas}
    if ComputeDtype.BFLOAT16 in computed:
        return BOUNDS[Dtype.BFLOAT16]
    return BOUNDS[plan.dtype]


class Canary:
    """Tries one path, and knows what each engine computes alone."""

    def __init__(self, relay: Relay, roster: Roster) -> None:
        self._relay = relay
        self._roster = roster
        self._model = roster.plan.model
        self._alone: dict[tuple[str, int], tuple[Step, ...]] = {}

    async def judge(self, path: Path, incarnations: tuple[int, ...]) -> Verdict | None:
        """A verdict for these incarnations; None when an end went away meanwhile."""
        cause = None
        try:
            await self._try(path)
        except RequestFailed as failure:
            cause = failure.message
        except CanaryFailed as failure:
            cause = f"{path.text}: {failure}"
        if self._roster.incarnations(path) != incarnations or self._roster.closed_cause(path):
            return None
        return Verdict(incarnations=incarnations, cause=cause)

    async def _try(self, path: Path) -> None:
        if path.prefill is None:
            steps_of(await self._answer(path, self._completion(path.decode)))
        else:
            await self._compare(path.prefill, path)
        await self._answer(path, chat(self._model))

    async def _compare(self, prefill: str, path: Path) -> None:
        """Raises CanaryFailed."""
        lone = next((name for name in (path.decode, prefill) if self._serves_alone(name)), None)
        alone = await self._computed_alone(lone) if lone is not None else ()
        handed = steps_of(await self._answer(path, self._completion(path.decode)))
        if lone is None:
            alone = await self._one_at_a_time(prefill, path, handed)
        taken = 0 if self._spec(path.decode).recomputes_last_token else 1
        found = difference(alone, handed, bound_of(self._roster.plan, path), taken)
        if found is not None:
            raise CanaryFailed(found)

    async def _computed_alone(self, name: str) -> tuple[Step, ...]:
        incarnation = self._roster.incarnations(Path(None, name))[0]
        known = self._alone.get((name, incarnation))
        if known is None:
            path = Path(None, name)
            known = steps_of(await self._answer(path, self._completion(name)))
            self._alone[name, incarnation] = known
        return known

    async def _one_at_a_time(
        self, prefill: str, path: Path, handed: Sequence[Step]
    ) -> tuple[Step, ...]:
        """Prefill's ranking of each token that was handed over, after all that were before it."""
        ranking = self._spec(prefill).ranking
        prompt: str | list[int] = PROMPT
        found: list[Step] = []
        for step in handed:
            ask = completion(self._model, ranking, prompt, 1)
            body = (await self._tried(path, with_ranking(ask, ranking))).prefilled_body
            found += steps_of(body)
            prompt = [*(prompt_of(body) if isinstance(prompt, str) else prompt), step.chosen]
        return tuple(found)

    def _completion(self, name: str) -> Ask:
        return completion(self._model, self._spec(name).ranking)

    def _spec(self, name: str) -> EngineSpec:
        return spec_for(self._roster.plan.replica(name).engine)

    def _serves_alone(self, name: str) -> bool:
        return self._roster.plan.replica(name).engine in SERVES_ALONE

    async def _answer(self, path: Path, ask: Ask) -> bytes:
        return (await self._tried(path, ask)).body

    async def _tried(self, path: Path, ask: Ask) -> Ledger:
        ledger = Ledger()
        timeout_s = min(self._roster.plan.timeout_s, TIMEOUT_S)
        await self._relay.attempt(path, ask, ledger, timeout_s=timeout_s)
        return ledger
