"""Greedy tokens of a pair beside those that one engine computes alone: where they part, and how
near the tie was.

Pages hold 16 bits, so a token that is almost as likely as the best may win after a handoff. Any
other difference is a fault. The whole run's comparisons are printed at its end (`conftest.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec

NEAR_TIE_NATS = 0.024
"""By how much an engine's own choice may lead a token that wins after a handoff: 16-bit pages
move either log probability by at most 0.012 (measured, `pdctl.runtime.router.canary`)."""

TOP = 5
"""Alternatives at each place; MLX names no more in completions' older form."""

COMPLETIONS_RANKING: dict[str, Any] = {"logprobs": TOP}
CHAT_RANKING: dict[str, Any] = {"logprobs": True, "top_logprobs": TOP}
"""Fields of a body that make every engine name the likeliest tokens at each place."""


class Step(NamedTuple):
    """One sampled token, and the log probability (nats) of each of the likeliest."""

    token: str
    likeliest: dict[str, float]


NOTHING = Step("", {})


class Parting(NamedTuple):
    """The first step at which a pair chose otherwise."""

    step: int
    own: str
    other: str
    gap_nats: float
    """How far `own` leads `other` where the engine computes alone; infinite where `other` is
    not among its likeliest."""

    def __str__(self) -> str:
        return f"step {self.step}: {self.own!r} → {self.other!r}, {self.gap_nats:.4f} nats apart"


def ranking(path: str) -> dict[str, Any]:
    """The fields for one of OpenAI's two routes."""
    return CHAT_RANKING if path.endswith("/chat/completions") else COMPLETIONS_RANKING


def steps_of(answer: dict[str, Any]) -> list[Step]:
    """Of an answer to a body with `ranking`, in either of OpenAI's shapes."""
    given = answer["choices"][0]["logprobs"]
    if "content" in given:
        return [_newer(entry) for entry in given["content"] or ()]
    return [
        Step(token, {token: logprob, **top})
        for token, logprob, top in zip(
            given["tokens"], given["token_logprobs"], given["top_logprobs"], strict=True
        )
    ]


def _newer(entry: dict[str, Any]) -> Step:
    ranked = (*entry["top_logprobs"], entry)
    return Step(entry["token"], {one["token"]: one["logprob"] for one in ranked})


def parting(own: Sequence[Step], other: Sequence[Step]) -> Parting | None:
    """None where both chose the same tokens to the end."""
    for at, (mine, theirs) in enumerate(zip_longest(own, other, fillvalue=NOTHING)):
        if mine.token != theirs.token:
            best = mine.likeliest.get(mine.token, float("inf"))
            gap = best - mine.likeliest.get(theirs.token, float("-inf"))
            return Parting(at, mine.token, theirs.token, gap)
    return None


def lead_where_parted(own: dict[str, Any], text: str) -> float:
    """By how many nats an engine's own choice led the next likeliest where `text` leaves its
    answer; 0 where it never does. For a pair whose decode engine ranks nothing."""
    at = 0
    for step in steps_of(own):
        if not text.startswith(step.token, at):
            best, second = sorted(step.likeliest.values(), reverse=True)[:2]
            return best - second
        at += len(step.token)
    return 0.0


def moved_nats(own: Sequence[Step], other: Sequence[Step]) -> float:
    """The most that a log probability moved, of tokens that both name, up to the parting."""
    most = 0.0
    for mine, theirs in zip(own, other, strict=False):
        both = mine.likeliest.keys() & theirs.likeliest.keys()
        apart = (abs(mine.likeliest[name] - theirs.likeliest[name]) for name in both)
        most = max(most, *apart, 0.0)
        if mine.token != theirs.token:
            break
    return most


class Comparison(NamedTuple):
    path: str
    prompt: str
    parting: Parting | None
    moved_nats: float


class Agreement:
    """One test's comparisons.

    Args:
        keep: gets each as it is made, in plain types.
    """

    def __init__(self, keep: Callable[[object], None]) -> None:
        self._keep = keep

    def check(self, path: str, prompt: str, own: dict[str, Any], other: dict[str, Any]) -> None:
        """Compares two answers to one body with `ranking`, and keeps the outcome.

        Args:
            path: what is compared with what: `vllm>mlx`, by which the report is grouped.
            prompt: which one, in the report's words.
            own: the answer of an engine that computed alone.

        Raises:
            AssertionError: they part where `own` was no near-tie.
        """
        mine, theirs = steps_of(own), steps_of(other)
        assert mine, own
        found = Comparison(path, prompt, parting(mine, theirs), moved_nats(mine, theirs))
        self._keep(msgspec.to_builtins(found))
        if found.parting is not None:
            assert found.parting.gap_nats <= NEAR_TIE_NATS, f"{path}, {prompt}: {found.parting}"


def report(kept: Iterable[object]) -> Iterator[str]:
    """Lines about all that was kept: one per path, then one per difference."""
    made = [msgspec.convert(each, Comparison) for each in kept]
    for path in dict.fromkeys(each.path for each in made):
        own = [each for each in made if each.path == path]
        equal = sum(each.parting is None for each in own)
        most = max(each.moved_nats for each in own)
        yield (
            f"{path}: {len(own)} prompts, {equal} equal; "
            f"no log probability moved by more than {most:.4f} nats"
        )
    for each in made:
        if each.parting is not None:
            yield f"  {each.path}, {each.prompt}: {each.parting} (bound {NEAR_TIE_NATS})"
