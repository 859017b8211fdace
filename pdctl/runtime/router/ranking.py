"""The likeliest tokens at each place of an answer, and how far those of two answers are apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class CanaryFailed(Exception):
    pass


class Token(msgspec.Struct, frozen=True):
    id: int
    logprob: float


class Step(msgspec.Struct, frozen=True):
    """One sampled token and the likeliest ones at its place."""

    chosen: int
    top: tuple[Token, ...]


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


def prompt_of(body: bytes) -> list[int]:
    """The tokens of an answer's prompt; raises CanaryFailed where it does not name them."""
    try:
        return [int(token) for token in msgspec.json.decode(body)["choices"][0]["prompt_token_ids"]]
    except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise CanaryFailed(f"its answer has no prompt tokens ({error!r})") from None


def _step(entry: dict[str, Any]) -> Step:
    top = tuple(Token(int(t["id"]), float(t["logprob"])) for t in entry["top_logprobs"])
    return Step(int(entry["id"]), top)


def _older_step(token: str, top: dict[str, float]) -> Step:
    likeliest = tuple(Token(_id_of(name), float(value)) for name, value in top.items())
    return Step(_id_of(token), likeliest)


def _id_of(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def difference(
    alone: Sequence[Step], handed: Sequence[Step], bound: float, taken: int = 0
) -> str | None:
    """What shows that the handed-over KV is not the engine's own; None when nothing does.

    Steps are compared while both chose the same token; where they part, the two choices must
    have been within `bound` of each other.

    Args:
        taken: how many of the first handed tokens prefill chose: they come without ranking.
    """
    if len(alone) <= taken or len(handed) <= taken:
        return "no token was generated"
    for at, (own, other) in enumerate(zip(alone, handed, strict=False)):
        worst = _apart(own, other.chosen) if at < taken else _worst(own, other)
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


def _apart(own: Step, chosen: int) -> float:
    """By how much the likeliest token is ahead of `chosen`, or of the last one listed."""
    known = _by_id(own)
    return max(known.values()) - known.get(chosen, min(known.values()))


def _by_id(step: Step) -> dict[int, float]:
    return {token.id: token.logprob for token in step.top} or {step.chosen: 0.0}
