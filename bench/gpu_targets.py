"""What pairs over NIXL reach under load, against the engines' own handoffs in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OWN, SLOWER, FASTER = 0.97, 1.0, 0.9
"""Output tokens/s of a pair: of one engine's own handoff; of two engines', the slower, the faster
own one."""
TAIL, LONE = 1.2, 1.1
"""TTFT: p95 of the better own handoff's, at 16 clients; p50 at one, of P alone + D's step."""
TAIL_CLIENTS = 16
ENGINES = {"v": "vllm", "s": "sglang"}

Rounds = Mapping[int, Sequence[Mapping[str, Any]]]


class Target(NamedTuple):
    way: str
    what: str
    ratio: float
    bound: float
    most: bool
    """Whether the ratio may be no more than the bound; else no less."""

    @property
    def met(self) -> bool:
        return self.ratio <= self.bound if self.most else self.ratio >= self.bound

    def __str__(self) -> str:
        sign = "≤" if self.most else "≥"
        verdict = "met" if self.met else "missed"
        return f"{self.way}: {self.what} {self.ratio:.2f}, {sign} {self.bound}: {verdict}"


def targets(ways: Mapping[str, Rounds]) -> list[Target]:
    """Of every pair over NIXL that has been measured beside what it is held against.

    Args:
        ways: by a way's name and clients, the figures of each round.
    """
    found: list[Target] = []
    for name in (each for each in ways if each.endswith(" nixl")):
        for clients in ways[name]:
            if clients == 1:
                found += _lone(ways, name)
            else:
                found += _loaded(ways, name, clients)
    return found


def _loaded(ways: Mapping[str, Rounds], name: str, clients: int) -> list[Target]:
    path = name.partition(" ")[0]
    natives = [f"{letter}p>{letter}d native" for letter in dict.fromkeys((path[0], path[3]))]
    rate = _median(ways, name, clients, "output_tokens_per_s")
    own = [_median(ways, each, clients, "output_tokens_per_s") for each in natives]
    known = [each for each in own if each]
    if not rate or len(known) < len(natives):
        return []
    what = f"tokens/s at {clients} ÷ "
    if len(known) == 1:
        found = [Target(name, what + "its own handoff", rate / known[0], OWN, most=False)]
    else:
        found = [
            Target(name, what + "the slower own handoff", rate / min(known), SLOWER, most=False),
            Target(name, what + "the faster own handoff", rate / max(known), FASTER, most=False),
        ]
    tail = _median(ways, name, clients, "ttft_p95_ms")
    tails = [_median(ways, f"{e}p>{e}d native", clients, "ttft_p95_ms") for e in ENGINES]
    if clients == TAIL_CLIENTS and tail and all(tails):
        better = min(each for each in tails if each)
        found.append(Target(name, "p95 at 16 ÷ the better own handoff", tail / better, TAIL, True))
    return found


def _lone(ways: Mapping[str, Rounds], name: str) -> list[Target]:
    """An SGLang decode shows P's first token and computes none before it."""
    path = name.partition(" ")[0]
    prefill, decode = (f"ordinary {ENGINES[path[at]]}" for at in (0, 3))
    ttft, alone = (_median(ways, each, 1, "ttft_p50_ms") for each in (name, prefill))
    step = 0.0 if path[3] == "s" else _median(ways, decode, 1, "tpot_p50_ms")
    if not ttft or not alone or step is None:
        return []
    return [Target(name, "p50 at 1 ÷ P alone + D's step", ttft / (alone + step), LONE, most=True)]


def _median(ways: Mapping[str, Rounds], name: str, clients: int, what: str) -> float | None:
    found = [each[what] for each in ways.get(name, {}).get(clients, ()) if each.get(what)]
    return statistics.median(found) if found else None
