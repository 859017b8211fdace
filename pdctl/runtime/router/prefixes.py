"""Which replica has computed which prefix, and the path that leaves least to compute. Pure.

What a replica was given lately is what its cache holds, as far as the router can know without
asking; a page that it has dropped meanwhile costs one prefill and corrects itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

from pdctl.runtime.router.policy import Candidate, Path

PAGES = 1 << 16
"""Remembered per replica: 4 M tokens, more than its own memory holds; 8 MB of the router's."""

WEIGHT = 0.1
"""Of the newest request in the usual one."""

SHARED = 0.25
"""What a page costs that a store brings, in pages that are computed."""


class Prefixes:
    """Page keys by the replicas that computed them, the least lately used forgotten first.

    Args:
        shared: replicas that read each other's pages through stores.
    """

    def __init__(self, shared: frozenset[str] = frozenset(), pages: int = PAGES) -> None:
        self.shared = shared
        self._limit = pages
        self._held: dict[str, OrderedDict[bytes, None]] = {}
        self._usual = 1.0

    @property
    def usual(self) -> float:
        """Pages that a request leaves to compute, lately: what waiting behind one costs."""
        return self._usual

    def computed(self, replica: str, keys: Sequence[bytes], missing: float) -> None:
        """A request with these pages, of which `missing` were to be computed, was served."""
        held = self._held.setdefault(replica, OrderedDict())
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._limit:
            held.popitem(last=False)
        self._usual += WEIGHT * (max(missing, 1.0) - self._usual)

    def forget(self, replica: str) -> None:
        """It was restarted: its cache is empty."""
        self._held.pop(replica, None)

    def missing(self, replica: str, keys: Sequence[bytes]) -> float:
        """Pages of the prompt that it would have to compute, the one with the tail too."""
        own = self._leading(replica, keys)
        best = own
        if replica in self.shared:
            best = max(own, *(self._leading(other, keys) for other in self.shared))
        return len(keys) + 1 - best + SHARED * (best - own)

    def _leading(self, replica: str, keys: Sequence[bytes]) -> int:
        held: Collection[bytes] = self._held.get(replica, ())
        return next((at for at, key in enumerate(keys) if key not in held), len(keys))


def computing(path: Path) -> str:
    """The replica of a path that computes prompts."""
    return path.prefill or path.decode


def nearest(
    candidates: Sequence[Candidate], missing: Mapping[Path, float], usual: float, turn: int
) -> Path:
    """The path with the fewest pages to compute before this request's first token: its own
    missing ones, and a usual request's for each one that runs there. Ties go round.

    Raises:
        ValueError: there is no candidate.
    """
    if not candidates:
        raise ValueError("no candidate")
    start = turn % len(candidates)
    rotated = [*candidates[start:], *candidates[:start]]

    def pages(candidate: Candidate) -> float:
        busiest = max(candidate.prefill_load, candidate.decode_load)
        return missing[candidate.path] + usual * busiest

    return min(rotated, key=pages).path
