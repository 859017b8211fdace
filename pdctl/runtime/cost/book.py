"""A curve per path, and what the latest requests say beyond it.

A request that had its replicas to itself is a sample of the curve. One that had to share them
is none, but it tells, as all do, by how much the prediction of its moment was off; the median of
the latest five of about this length corrects the next prediction (`drift`). So three slow answers
are followed, and one or two are not; what is small is left to the curve. A drift that is not
confirmed fades.

Owned by the event loop; the clock (Unix seconds) is passed in.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping

import msgspec

from pdctl.runtime.cost.curve import Curve, fit, medians
from pdctl.runtime.cost.record import PathRecord, Sample, replicas_of

RECENT = 12
DRIFT_OF = 5
"""Latest requests whose median is the drift."""
SMALLEST_DRIFT = 1.15
NEAR_OCTAVES = 1.0
FADES_S = 30.0
"""Half-life of a drift that nothing confirms."""
LARGEST_DRIFT = 100.0
FAR = 2.0
"""Beyond this multiple of the longest prompt that was measured a time is an extrapolation."""


class Seen(msgspec.Struct, frozen=True):
    """One request: what it would have taken on replicas of its own, as far as the queues that
    were known explain the rest."""

    at: float
    tokens: int
    seconds: float


class Book:
    """Everything that is known of the paths' costs."""

    def __init__(self, records: Mapping[str, PathRecord] | None = None) -> None:
        self._records = dict(records or {})
        self._curves: dict[str, Curve | None] = {}
        self._seen: dict[str, deque[Seen]] = {}
        self.changes = 0
        """Raised by every change of what `records` gives."""

    @property
    def records(self) -> dict[str, PathRecord]:
        return dict(self._records)

    def record(self, path: str) -> PathRecord | None:
        return self._records.get(path)

    def open(self, path: str, fresh: PathRecord) -> None:
        """Keeps what is known where it is of the same replicas; begins with `fresh` otherwise."""
        known = self._records.get(path)
        same = known is not None and (known.identity, known.contract, known.versions) == (
            *(fresh.identity, fresh.contract),
            fresh.versions,
        )
        if not same:
            self._records[path] = fresh
            self._forget(path)
            self._seen.pop(path, None)

    def keep_only(self, paths: frozenset[str]) -> None:
        """Drops every other path."""
        for path in [path for path in self._records if path not in paths]:
            del self._records[path]
            self._forget(path)
            self._seen.pop(path, None)

    def sampled(self, path: str, sample: Sample) -> None:
        """A request that had its replicas to itself; nothing where the path isn't open."""
        record = self._records.get(path)
        if record is not None and sample.tokens > 0 and sample.ttft_s > 0:
            self._records[path] = record.with_sample(sample)
            self._forget(path)

    def explained(self, path: str, prefill_s: float, transfer_s: float) -> None:
        """What the engines say of the handoff of the newest sample."""
        record = self._records.get(path)
        if record is not None and record.samples:
            *older, newest = record.samples
            told = msgspec.structs.replace(newest, prefill_s=prefill_s, transfer_s=transfer_s)
            self._records[path] = msgspec.structs.replace(record, samples=(*older, told))
            self.changes += 1

    def met(self, path: str, round_trip_s: float) -> None:
        """Between the ends of a pair; the newest counts, nothing where the path isn't open."""
        record = self._records.get(path)
        if record is not None and record.round_trip_s != round_trip_s:
            self._records[path] = msgspec.structs.replace(record, round_trip_s=round_trip_s)
            self.changes += 1

    def stepped(self, path: str, step_s: float) -> None:
        """Seconds between two tokens of a stream that ran alone."""
        record = self._records.get(path)
        if record is not None and step_s > 0:
            self._records[path] = record.with_step(step_s)
            self.changes += 1

    def seen(self, path: str, tokens: int, ttft_s: float, expected_s: float, now: float) -> None:
        """Any request: what it took, and what the curve alone had said, queues included."""
        curve = self.curve(path)
        if curve is None or expected_s <= 0 or ttft_s <= 0:
            return
        alone_s = ttft_s / expected_s * curve.at(tokens)
        recent = self._seen.setdefault(path, deque(maxlen=RECENT))
        recent.append(Seen(now, tokens, alone_s))

    def curve(self, path: str) -> Curve | None:
        """None where nothing was measured."""
        if path not in self._curves:
            record = self._records.get(path)
            samples = [] if record is None else [(s.tokens, s.ttft_s) for s in record.samples]
            self._curves[path] = fit(medians(samples))
        return self._curves[path]

    def drift(self, path: str, tokens: int, now: float) -> float:
        """By how much the latest requests of about this length differ from the curve; 1.0 where
        there are fewer than two."""
        curve = self.curve(path)
        recent = list(self._seen.get(path, ()))
        if curve is None or len(recent) < 2:
            return 1.0
        near = [s for s in recent if abs(math.log2(s.tokens / tokens)) <= NEAR_OCTAVES]
        latest = (near if len(near) >= 2 else recent)[-DRIFT_OF:]
        found = _median([math.log(seen.seconds / curve.at(seen.tokens)) for seen in latest])
        if abs(found) < math.log(SMALLEST_DRIFT):
            return 1.0
        bound = math.log(LARGEST_DRIFT)
        age_s = max(0.0, now - latest[-1].at)
        return math.exp(max(-bound, min(bound, found)) * 0.5 ** (age_s / FADES_S))

    def expected_s(self, path: str, tokens: int, now: float) -> float | None:
        """The time to the first token on replicas that do nothing else; None where nothing was
        measured."""
        curve = self.curve(path)
        return None if curve is None else curve.at(tokens) * self.drift(path, tokens, now)

    def extrapolates(self, path: str, tokens: int) -> bool:
        """Whether what is expected of such a prompt comes from much shorter ones."""
        curve = self.curve(path)
        return curve is not None and tokens > FAR * curve.longest

    def steps_s(self, replica: str) -> list[float]:
        """Decode steps of streams that ran alone, by whatever path ends on this replica."""
        return [
            step
            for path, record in self._records.items()
            if replicas_of(path)[-1] == replica
            for step in record.steps_s
        ]

    def step_s(self, replica: str) -> float | None:
        """A decode step of one stream there."""
        steps = self.steps_s(replica)
        return statistics.median(steps) if steps else None

    def _forget(self, path: str) -> None:
        self._curves.pop(path, None)
        self.changes += 1


def _median(values: list[float]) -> float:
    """Of an even number, of the two in the middle the one nearer to zero: half of the answers
    must not move what is expected."""
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return 0.0 if low < 0 < high else min(low, high, key=abs)
