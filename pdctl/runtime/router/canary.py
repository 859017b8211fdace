"""A real generation through every path before it takes traffic, and what it must show.

A pair's canary sends one completion prefill → decode and compares the first tokens with what
the decode engine computes alone, step by step, on the log probabilities of the ten most
likely tokens. Then a chat request goes the same way, so that templates which the two engines
render differently fail on the handoff's token digest. An ordinary replica's canary is the
same two requests without a comparison.

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

from pdctl.engines.registry import spec_for
from pdctl.runtime.router.endpoints import CHAT_COMPLETIONS, COMPLETIONS
from pdctl.runtime.router.failure import RequestFailed
from pdctl.runtime.router.members import Roster, Verdict
from pdctl.runtime.router.policy import Path
from pdctl.runtime.router.relay import Relay
from pdctl.runtime.router.request import Ask
from pdctl.topology.model import ComputeDtype, Dtype
from pdctl.topology.plan import Plan

log = logging.getLogger("pdctl.router")

BOUNDS = {Dtype.FLOAT16: 0.12, Dtype.BFLOAT16: 0.5}
"""Largest difference of one token's log probability that rounding may explain (nats)."""

TOP = 10
TOKENS = 4
TIMEOUT_S = 120.0

PROMPT = (
    "In a small town by the sea there lived an old clock maker who repaired every watch that "
    "people brought to him. One winter morning a girl came with a silver watch that had "
    "stopped at seven minutes past nine, and she asked him whether time itself could be "
    "mended. He opened the case, looked at the tiny wheels, smiled and said that"
)
"""Over one page (64 tokens) with any tokenizer, so that a page boundary is crossed."""

QUESTION = "Name one colour."


class Token(msgspec.Struct, frozen=True):
    id: int
    logprob: float


class Step(msgspec.Struct, frozen=True):
    """One sampled token and the likeliest ones at its place."""

    chosen: int
    top: tuple[Token, ...]


class CanaryFailed(Exception):
    pass


class Ledger:
    """A delivery that keeps the answer."""

    def __init__(self) -> None:
        self.body = b""
        self.begun = False

    def route(self, path: Path, room: int | None, retried: Path | None) -> None:
        return

    def recomputed(self, path: Path) -> None:
        return

    async def whole(self, body: bytes, content_type: str) -> None:
        self.body = body

    async def event(self, raw: bytes) -> None:
        self.body += raw

    async def end(self) -> None:
        return


def completion(model: str, ranking: Mapping[str, Any]) -> Ask:
    """Greedy, with log probabilities, past every prompt cache: a salt that is used once finds
    nothing in an engine's, and leaves nothing to be found."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "pdctl_cache": False,
        "cache_salt": secrets.token_hex(8),
        **ranking,
    }
    return Ask(endpoint=COMPLETIONS, body=body, stream=False)


def chat(model: str) -> Ask:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 2,
        "temperature": 0.0,
        "pdctl_cache": False,
        "cache_salt": secrets.token_hex(8),
    }
    return Ask(endpoint=CHAT_COMPLETIONS, body=body, stream=False)


def bound_of(plan: Plan, path: Path) -> float:
    """The pages' bound, or bfloat16's where either end computes in it."""
    computed = {plan.replica(name).compute_dtype for name in path.replicas}
    if ComputeDtype.BFLOAT16 in computed:
        return BOUNDS[Dtype.BFLOAT16]
    return BOUNDS[plan.dtype]


def steps_of(body: bytes) -> tuple[Step, ...]:
    """The sampled tokens of an answer with log probabilities: `logprobs.content` with ids, or
    completions' older form with tokens named by id.

    Raises:
        CanaryFailed: it has none.
    """
    try:
        given = msgspec.json.decode(body)["choices"][0]["logprobs"]
        if "content" in given:
            return tuple(_step(entry) for entry in given["content"])
        ranked = zip(given["tokens"], given["top_logprobs"], strict=True)
        return tuple(_older_step(token, top) for token, top in ranked)
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise CanaryFailed(f"its answer has no log probabilities ({error!r})") from None


def _step(entry: dict[str, Any]) -> Step:
    top = tuple(Token(int(t["id"]), float(t["logprob"])) for t in entry["top_logprobs"])
    return Step(int(entry["id"]), top)


def _older_step(token: str, top: dict[str, float]) -> Step:
    likeliest = tuple(Token(_id_of(name), float(value)) for name, value in top.items())
    return Step(_id_of(token), likeliest)


def _id_of(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def difference(alone: Sequence[Step], handed: Sequence[Step], bound: float) -> str | None:
    """What shows that the handed-over KV is not the engine's own; None when nothing does.

    Steps are compared while both chose the same token; where they part, the two choices must
    have been within `bound` of each other.
    """
    if not alone or not handed:
        return "no token was generated"
    for at, (own, other) in enumerate(zip(alone, handed, strict=False)):
        worst = _worst(own, other)
        if not worst <= bound:
            return (
                f"log probabilities at token {at} differ by {worst:.2f} from what the engine "
                f"computes alone (at most {bound:g} is rounding): the KV cache is not its own"
            )
        if own.chosen != other.chosen:
            return None
    return None


def _worst(own: Step, other: Step) -> float:
    """Largest difference over both lists; a token that one list lacks is at most as likely
    there as that list's last."""
    left, right = _by_id(own), _by_id(other)
    floors = min(left.values()), min(right.values())
    worst = 0.0
    for token in left.keys() | right.keys():
        if token in left and token in right:
            apart = abs(left[token] - right[token])
        elif token in left:
            apart = left[token] - floors[1]
        else:
            apart = right[token] - floors[0]
        worst = max(worst, apart) if apart == apart else float("inf")
    return worst


def _by_id(step: Step) -> dict[int, float]:
    return {token.id: token.logprob for token in step.top} or {step.chosen: 0.0}


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
            steps_of(await self._answer(path, self._completion(path)))
        else:
            alone = await self._computed_alone(path.decode)
            handed = steps_of(await self._answer(path, self._completion(path)))
            found = difference(alone, handed, bound_of(self._roster.plan, path))
            if found is not None:
                raise CanaryFailed(found)
        await self._answer(path, chat(self._model))

    def _completion(self, path: Path) -> Ask:
        engine = self._roster.plan.replica(path.decode).engine
        return completion(self._model, spec_for(engine).ranking)

    async def _computed_alone(self, name: str) -> tuple[Step, ...]:
        incarnation = self._roster.incarnations(Path(None, name))[0]
        known = self._alone.get((name, incarnation))
        if known is None:
            path = Path(None, name)
            known = steps_of(await self._answer(path, self._completion(path)))
            self._alone[name, incarnation] = known
        return known

    async def _answer(self, path: Path, ask: Ask) -> bytes:
        ledger = Ledger()
        timeout_s = min(self._roster.plan.timeout_s, TIMEOUT_S)
        await self._relay.attempt(path, ask, ledger, timeout_s=timeout_s)
        return ledger.body
