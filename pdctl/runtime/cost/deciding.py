"""P/D or alone, per request: the faster, unless that would flap or leave a path unknown.

1. a path that was never measured is tried first, once per path and class of length; so is one
   whose time is extrapolated from much shorter prompts, where that is within `WORTH` of the best
2. of each kind (P/D, alone) the path that is expected to be fastest stands for it
3. the kind that was taken for this class of length last stays, unless the other is expected to
   be faster by more than `HELD` of its time
4. now and then the path that was not taken for longest is, all the same, so that what became
   faster is noticed: at most every `EVERY`th request, and only while all such requests together
   cost no more than `SHARE` of the time to the first token of all requests so far

No I/O and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from pdctl.runtime.cost.curve import length_class

HELD = 0.05
EVERY = 16
SHARE = 0.02
WORTH = 2.0

FASTER, HELD_ON, EXPLORED, UNMEASURED, ONLY = "faster", "held", "explored", "unmeasured", "only"
REASONS = (FASTER, HELD_ON, EXPLORED, UNMEASURED, ONLY)


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A path that could take the request."""

    path: str
    total_s: float | None
    """Expected time to the first token, behind what is queued; None where nothing was measured."""
    extrapolated: bool = False
    """From prompts that are much shorter."""

    @property
    def splits(self) -> bool:
        return ">" in self.path


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    reason: str
    tokens: int
    """Of the prompt, as estimated."""
    expected_s: dict[str, float]
    """By path, of those that were measured; queues included."""

    @property
    def text(self) -> str:
        """As the response header has it: `faster; tokens=744 p0>d0=41ms d0=63ms`."""
        times = "".join(f" {path}={_milliseconds(s)}ms" for path, s in self.expected_s.items())
        return f"{self.reason}; tokens={self.tokens}{times}"


def _milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


class Decider:
    """Decides one request after another; owned by the event loop."""

    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()
        self.expected_s = 0.0
        """Of all that were decided, the sum of what was best."""
        self.exploring_s = 0.0
        """What exploring cost, as expected."""
        self._splits: dict[int, bool] = {}
        """By class of length, what was taken last."""
        self._tried: set[tuple[str, int]] = set()
        self._since = 0
        self._turn = 0
        self._taken: dict[str, int] = {}
        """Path → the turn in which it was taken last."""

    @property
    def decided(self) -> int:
        return sum(self.by_reason.values())

    def decide(self, options: Sequence[Option], tokens: int) -> Decision:
        """Raises ValueError where there is no option."""
        if not options:
            raise ValueError("no option")
        self._turn += 1
        start = self._turn % len(options)
        rotated = [*options[start:], *options[:start]]
        chosen, reason = self._chosen(rotated, length_class(tokens))
        self._taken[chosen.path] = self._turn
        self.by_reason[reason] += 1
        return Decision(
            path=chosen.path,
            reason=reason,
            tokens=tokens,
            expected_s={o.path: o.total_s for o in options if o.total_s is not None},
        )

    def _chosen(self, options: Sequence[Option], kind: int) -> tuple[Option, str]:
        if len(options) == 1:
            return options[0], ONLY
        known = [o for o in options if o.total_s is not None]
        best = min(known, key=_time, default=None)
        for option in options:
            if _is_worth_a_try(option, best) and (option.path, kind) not in self._tried:
                self._tried.add((option.path, kind))
                return option, UNMEASURED
        if best is None:
            return options[0], UNMEASURED
        self._since += 1
        self.expected_s += _time(best)
        longest = min(known, key=lambda o: self._taken.get(o.path, 0))
        if longest is not best and self._explores(best, longest):
            return longest, EXPLORED
        others = [o for o in known if o.splits != best.splits]
        if not others:
            return best, ONLY
        other = min(others, key=_time)
        if self._splits.get(kind) == other.splits and _time(other) * (1 - HELD) <= _time(best):
            return other, HELD_ON
        self._splits[kind] = best.splits
        return best, FASTER

    def _explores(self, best: Option, other: Option) -> bool:
        loss_s = _time(other) - _time(best)
        affordable = self.exploring_s + loss_s <= SHARE * self.expected_s
        if self._since < EVERY or not affordable:
            return False
        self._since = 0
        self.exploring_s += loss_s
        return True


def _is_worth_a_try(option: Option, best: Option | None) -> bool:
    if option.total_s is None or best is None:
        return True
    return option.extrapolated and option.total_s <= WORTH * _time(best)


def _time(option: Option) -> float:
    assert option.total_s is not None, "only measured options are compared"
    return option.total_s
