"""What `/metrics` shows: the replicas' own counters, and what the router measures."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pdctl.handoff import counters
from pdctl.handoff.counters import BUCKETS_S, COUNTED, INNER, Counters, shown_pair
from pdctl.runtime.router.failure import RequestFailed
from pdctl.runtime.router.members import Roster, Seat
from pdctl.runtime.router.recent import RecentFailures
from pdctl.trace import monotonic_s

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

GAUGES = frozenset(
    {"handoffs_active", "buffer_bytes_used", "waiters", "requests_active", "round_trip_s"}
)
SCALARS = tuple(
    name for name in Counters.__struct_fields__ if name not in ("failures", "phases", *INNER)
)
_HEADING = re.compile(rb"^# (HELP|TYPE) (pdctl_(?!router_)\w+)_total ", re.MULTILINE)
"""Of a replica's or a pair's counter: prometheus-client appends what their names don't have."""
_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


def pair_counters(prefill: Seat | None, decode: Seat | None) -> dict[str, Any]:
    """A pair's counters; None is what neither end can tell."""
    ends = (
        None if seat is None else (seat.name, seat.state.counters) for seat in (prefill, decode)
    )
    return shown_pair(*ends)


class Meter:
    """The router's own measurements, and the registry that `/metrics` prints."""

    def __init__(self, roster: Roster) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Replicas(roster))
        self.active = 0
        self.total = 0
        self.failures = 0
        self.refused = 0
        """Answered with a 4xx: a client's own mistakes."""
        self.recent = RecentFailures(roster.plan.cluster)
        self._started_s = monotonic_s()
        self._active = Gauge(
            "pdctl_router_requests_active", "Requests in the router.", registry=self._registry
        )
        self._requests = Counter(
            "pdctl_router_requests",
            "Answered requests, by path and status.",
            ["path", "status"],
            registry=self._registry,
        )
        self._failed = Counter(
            "pdctl_router_failures",
            "Failed legs, by leg, replica and cause.",
            ["leg", "replica", "cause"],
            registry=self._registry,
        )
        self._decisions = Counter(
            "pdctl_router_decisions",
            'Requests whose path disaggregate = "auto" decided, by path and reason.',
            ["path", "reason"],
            registry=self._registry,
        )
        self._ttft = self._histogram("pdctl_router_ttft_seconds", "Arrival to first byte sent.")
        self._e2e = self._histogram("pdctl_router_e2e_seconds", "Arrival to last byte sent.")

    def _histogram(self, name: str, says: str) -> Histogram:
        return Histogram(name, says, ["path"], buckets=_BUCKETS, registry=self._registry)

    def began(self) -> None:
        self.active += 1
        self.total += 1
        self._active.set(self.active)

    def ended(self, path: str, status: str, *, ttft_s: float | None, e2e_s: float) -> None:
        """`status`: the HTTP status, "cut" for a stream that ended in an error, "gone" for a
        client that left."""
        self.active -= 1
        self._active.set(self.active)
        self._requests.labels(path, status).inc()
        if status == "200":
            self._e2e.labels(path).observe(e2e_s)
            if ttft_s is not None:
                self._ttft.labels(path).observe(ttft_s)
        elif status.startswith("4"):
            self.refused += 1
        elif status != "gone":
            self.failures += 1

    def decided(self, path: str, reason: str) -> None:
        self._decisions.labels(path, reason).inc()

    @property
    def uptime_s(self) -> float:
        return monotonic_s() - self._started_s

    def failed(self, failure: RequestFailed) -> None:
        """Counts a try's failure, and keeps it where it is not the client's own."""
        self.recent.add(failure)
        if failure.leg is not None:
            self._failed.labels(failure.leg, failure.replica or "", failure.code or "").inc()

    def text(self) -> bytes:
        return _HEADING.sub(rb"# \1 \2 ", generate_latest(self._registry))


class _Replicas(Collector):
    """Counters under the names that DESIGN §6 fixes (prefix `pdctl_`, nothing appended)."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        seats = self._roster.seats()
        for name in SCALARS:
            family = Metric(f"pdctl_{name}", f"{name} of one replica.", _kind(name))
            for seat in seats:
                if name in seat.state.counters.untold:
                    continue
                labels = {"replica": seat.name, "role": seat.state.role.value}
                family.add_sample(f"pdctl_{name}", labels, getattr(seat.state.counters, name))
            yield family
        yield self._causes(seats)
        yield self._phases(seats)
        yield from self._pairs()
        yield self._states()

    def _causes(self, seats: Iterable[Seat]) -> Metric:
        name = "pdctl_handoffs_failed_by_cause"
        family = Metric(name, "handoffs_failed of one replica, by cause.", "counter")
        for seat in seats:
            for cause, count in seat.state.counters.failures.items():
                family.add_sample(name, {"replica": seat.name, "cause": cause}, count)
        return family

    def _phases(self, seats: Iterable[Seat]) -> Metric:
        family = HistogramMetricFamily(
            "pdctl_handoff_phase_seconds",
            "Seconds per phase of a handoff.",
            labels=["replica", "phase"],
        )
        for seat in seats:
            for phase, histogram in seat.state.counters.phases.items():
                family.add_metric([seat.name, phase], _buckets(histogram), histogram.sum_s)
        return family

    def _pairs(self) -> Iterator[Metric]:
        told = {}
        for path in self._roster.paths:
            if path.prefill is not None:
                ends = self._roster.seat(path.prefill), self._roster.seat(path.decode)
                told[path.prefill, path.decode] = pair_counters(*ends)
        names = {field: f"pdctl_pair_{field}" for field in COUNTED}
        for field, name in {**names, "round_trip_s": "pdctl_pair_round_trip_seconds"}.items():
            family = Metric(name, f"{field} of one pair.", _kind(field))
            for (prefill, decode), values in told.items():
                if values[field] is not None:
                    family.add_sample(name, {"prefill": prefill, "decode": decode}, values[field])
            yield family
        phases = HistogramMetricFamily(
            "pdctl_pair_handoff_phase_seconds",
            "Seconds per phase of one pair's handoffs.",
            labels=["prefill", "decode", "phase"],
        )
        for pair, values in told.items():
            for phase, seen in values["phases"].items():
                histogram = msgspec.convert(seen, counters.Histogram)
                phases.add_metric([*pair, phase], _buckets(histogram), histogram.sum_s)
        yield phases

    def _states(self) -> Metric:
        family = GaugeMetricFamily(
            "pdctl_path_ready", "1 while the path takes requests.", labels=["path"]
        )
        ready = set(self._roster.ready())
        for path in self._roster.paths:
            family.add_metric([path.text], float(path in ready))
        return family


def _buckets(histogram: counters.Histogram) -> list[tuple[str, float]]:
    bounds = [*(repr(bound) for bound in BUCKETS_S), "+Inf"]
    running = itertools.accumulate(histogram.counts)
    return list(zip(bounds, running, strict=True))


def _kind(name: str) -> str:
    return "gauge" if name in GAUGES else "counter"
