"""Counters and phase histograms of one replica, as they stand in `/status` and `/metrics`."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from pdctl.trace import monotonic_s

PHASES = ("queue", "prefill", "transfer", "import", "first_token")
"""Phases of a handoff, in order.

queue        P: the request arrived → its pages are reserved and compute starts
prefill      P: compute starts → the last forward pass that a page needs has ended
transfer     P: that moment → the receiver's Done has arrived
import       D: the last page has arrived → the engine starts its first forward on them
first_token  D: that moment → the first token is sampled
"""

BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
    1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. `counts[i]` observations lie at or under `BUCKETS_S[i]` and above the one
    before; the last count is everything above the last bound."""

    counts: tuple[int, ...] = (0,) * (len(BUCKETS_S) + 1)
    sum_s: float = 0.0
    last_s: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observed(self, seconds: float) -> Histogram:
        counts = list(self.counts)
        counts[bisect_left(BUCKETS_S, seconds)] += 1
        return Histogram(counts=tuple(counts), sum_s=self.sum_s + seconds, last_s=seconds)


class PairCounters(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a replica's counters that concerns one peer, keyed by the peer's name."""

    handoffs_active: int = 0
    handoffs_completed: int = 0
    handoffs_failed: int = 0
    handoffs_cancelled: int = 0
    imported_tokens: int = 0
    host_bytes: int = 0
    gpu_bytes: int = 0
    reused_pages: int = 0
    phases: dict[str, Histogram] = {}
    round_trip_s: float | None = None
    """The shortest that was seen between the two ends, when one proved itself to the other; of the
    receiver only, and not of an engine's own handoff."""


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's counters since it started. Names are fixed by DESIGN §6.

    On a prefill replica `host_bytes` are page bytes sent, on a decode replica page bytes
    received; `imported_tokens` counts on the receiver only, tokens committed to the engine.
    """

    handoffs_active: int = 0
    handoffs_completed: int = 0
    handoffs_failed: int = 0
    handoffs_cancelled: int = 0
    imported_tokens: int = 0
    host_bytes: int = 0
    gpu_bytes: int = 0
    reused_pages: int = 0
    buffer_bytes_used: int = 0
    waiters: int = 0
    requests_active: int = 0
    """HTTP requests inside the engine, of every kind."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    stored_pages: int = 0
    """Written into the host's page store by this replica; the next three are its, too."""
    read_pages: int = 0
    """Taken from it."""
    missed_pages: int = 0
    """Full pages of prompts that were asked for and not there."""
    evicted_pages: int = 0
    """That went to make room for this replica's."""
    reused_tokens: int = 0
    """Positions that were taken from the store and not computed."""
    shared_bytes: int = 0
    """Of pages written and taken."""
    failures: dict[str, int] = {}
    """By cause (`pdctl.errors.HANDOFF_CAUSES`)."""
    phases: dict[str, Histogram] = {}
    pairs: dict[str, PairCounters] = {}
    rooms: dict[int, float] = {}
    """Open handoffs: room → seconds since its last progress."""
    decoding: dict[int, float] = {}
    """Requests whose handoff is over, in the decode engine: room → seconds since their last
    token was computed. Absent where the engine's adapter does not tell."""
    untold: tuple[str, ...] = ()
    """Names of the counters above that this replica can't tell: their zeros mean nothing."""


OF_PAGES = ("reused_pages", "buffer_bytes_used", "waiters")
"""Counters that mean nothing where no canonical page travels."""

COUNTED = tuple(
    name for name in PairCounters.__struct_fields__ if name not in ("phases", "round_trip_s")
)
"""Of `PairCounters`, what is one whole number."""

OF_A_HANDOFF = tuple(dict.fromkeys((*COUNTED, *OF_PAGES)))
"""All that an engine's own handoff may leave untold."""

INNER = ("pairs", "rooms", "decoding", "untold")
"""Of `Counters`, what no table shows."""


def shown_counters(counters: Counters) -> dict[str, Any]:
    """A replica's row: what it can't tell is None."""
    built: dict[str, Any] = msgspec.to_builtins(counters)
    return {k: None if k in counters.untold else v for k, v in built.items() if k not in INNER}


def shown_pair(
    sender: tuple[str, Counters] | None, receiver: tuple[str, Counters] | None
) -> dict[str, Any]:
    """A pair's row: of what both ends count, the larger; the ends report at different moments,
    and some failures are known to one of them only. None is what neither can tell. A phase is
    seen by one end.

    Args:
        sender: its name and its counters; None where nothing is known of it.
    """
    ends = []
    if sender is not None and receiver is not None:
        for (_, own), (peer, _) in ((sender, receiver), (receiver, sender)):
            ends.append((own.untold, own.pairs.get(peer, PairCounters())))
    found: dict[str, Any] = {}
    for name in COUNTED:
        told = [getattr(pair, name) for untold, pair in ends if name not in untold]
        found[name] = max(told) if told else (None if ends else 0)
    trips = [pair.round_trip_s for _, pair in ends if pair.round_trip_s is not None]
    phases = {name: seen for _, pair in ends for name, seen in pair.phases.items()}
    return {
        **found,
        "phases": msgspec.to_builtins(phases),
        "round_trip_s": min(trips, default=None),
    }


class CounterBoard:
    """The one mutable place for a replica's counters; thread-safe, cheap to read.

    Gauges that other objects own (`buffer_bytes_used`, `waiters`, `requests_active`) are set
    with `gauge`; everything else is added.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = Counters()
        self._watched: tuple[Callable[[], dict[int, float]], ...] = ()
        self._decoded: dict[int, float] = {}

    def watch(self, rooms: Callable[[], dict[int, float]]) -> None:
        """`rooms` tells, on any thread, of the open handoffs as `Counters.rooms` does."""
        self._watched += (rooms,)

    def add(self, *, peer: str | None = None, **amounts: int) -> None:
        """Adds (or, with a negative amount, takes) to counters; `peer` also to its pair."""
        with self._lock:
            now = self._counters
            changed = {name: getattr(now, name) + n for name, n in amounts.items()}
            if peer is not None:
                pair = now.pairs.get(peer, PairCounters())
                part = {
                    name: getattr(pair, name) + n for name, n in amounts.items() if name in COUNTED
                }
                changed["pairs"] = {**now.pairs, peer: msgspec.structs.replace(pair, **part)}
            self._counters = msgspec.structs.replace(now, **changed)

    def gauge(self, **values: int) -> None:
        with self._lock:
            self._counters = msgspec.structs.replace(self._counters, **values)

    def untell(self, names: Iterable[str]) -> None:
        """These can't be told from now on."""
        with self._lock:
            self._counters = msgspec.structs.replace(self._counters, untold=tuple(names))

    def failure(self, cause: str) -> None:
        """Counts one failure by cause; `handoffs_failed` is added separately."""
        with self._lock:
            now = self._counters
            failures = {**now.failures, cause: now.failures.get(cause, 0) + 1}
            self._counters = msgspec.structs.replace(now, failures=failures)

    def decoded(self, room: int) -> None:
        """A token of the request that came through this room was computed."""
        with self._lock:
            self._decoded[room] = monotonic_s()

    def decode_over(self, room: int) -> None:
        """No more of them are to come; nothing where none came."""
        with self._lock:
            self._decoded.pop(room, None)

    def observe(self, phase: str, seconds: float, peer: str) -> None:
        """Adds one observation to a phase of PHASES, of the replica and of its pair with `peer`;
        KeyError for any other name."""
        if phase not in PHASES:
            raise KeyError(phase)
        with self._lock:
            now = self._counters
            pair = now.pairs.get(peer, PairCounters())
            pair = msgspec.structs.replace(pair, phases=_observed(pair.phases, phase, seconds))
            self._counters = msgspec.structs.replace(
                now,
                phases=_observed(now.phases, phase, seconds),
                pairs={**now.pairs, peer: pair},
            )

    def met(self, peer: str, round_trip_s: float) -> None:
        """A peer has proved itself, so long after it was asked; the shortest stays."""
        with self._lock:
            now = self._counters
            pair = now.pairs.get(peer, PairCounters())
            if pair.round_trip_s is None or round_trip_s < pair.round_trip_s:
                pair = msgspec.structs.replace(pair, round_trip_s=round_trip_s)
                self._counters = msgspec.structs.replace(now, pairs={**now.pairs, peer: pair})

    def read(self) -> Counters:
        rooms = {room: idle_s for watched in self._watched for room, idle_s in watched().items()}
        with self._lock:
            now_s = monotonic_s()
            decoding = {room: now_s - at_s for room, at_s in self._decoded.items()}
            counters = self._counters
        if not rooms and not decoding:
            return counters
        return msgspec.structs.replace(counters, rooms=rooms, decoding=decoding)


def _observed(phases: dict[str, Histogram], phase: str, seconds: float) -> dict[str, Histogram]:
    return {**phases, phase: phases.get(phase, Histogram()).observed(max(0.0, seconds))}
