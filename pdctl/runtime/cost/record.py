"""What was measured of each path, as it is stored with the cluster's state, and what it holds for.

A record holds for these engines, versions, devices, options and weights. Where one of them is
another, nothing of it is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from pdctl.runtime.cost.curve import length_class
from pdctl.topology.plan import Plan, ReplicaPlan

FORMAT = 1
KEPT = 5
"""Newest samples per class of length."""
STEPS_KEPT = 9
LENGTHS_KEPT = 48


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request that had its replicas to itself."""

    tokens: int
    ttft_s: float
    """From the router's first byte to an engine, to the first output that left it."""
    at: float
    """Unix seconds."""
    prefill_s: float | None = None
    """Of a handoff: P's computing, by P's own account."""
    transfer_s: float | None = None
    """Of a handoff: from the end of computing to Done."""


class PathRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One path's samples, oldest first."""

    identity: str
    """Of its replicas' engines, devices and options."""
    contract: str
    """Digest of the model that they serve."""
    versions: tuple[str, ...]
    """Of its replicas' engines, prefill first."""
    samples: tuple[Sample, ...] = ()
    steps_s: tuple[float, ...] = ()
    """Seconds between two tokens of one stream alone, newest last."""
    round_trip_s: float | None = None
    """Of a pair: between its two ends, as their data plane saw it."""

    def with_sample(self, sample: Sample) -> PathRecord:
        """Bounded: of a class of length only the newest are kept."""
        kind = length_class(sample.tokens)
        same = [s for s in self.samples if length_class(s.tokens) == kind]
        dropped = set(map(id, same[: max(0, len(same) - KEPT + 1)]))
        kept = tuple(s for s in self.samples if id(s) not in dropped)
        return msgspec.structs.replace(self, samples=(*kept, sample))

    def with_step(self, step_s: float) -> PathRecord:
        return msgspec.structs.replace(self, steps_s=(*self.steps_s, step_s)[-STEPS_KEPT:])


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """The file. Nothing of any prompt is in it but lengths."""

    format: int = FORMAT
    paths: dict[str, PathRecord] = {}
    """By path, `p0>d0` or `d0`."""
    lengths: dict[str, tuple[tuple[int, int], ...]] = {}
    """(bytes, tokens) of prompts, by kind of request."""


def encode(costs: Costs) -> bytes:
    return msgspec.json.encode(costs)


def decode(raw: bytes | None) -> Costs:
    """Empty where nothing was stored, or what was is damaged or another version's: measuring
    again is cheap."""
    if not raw:
        return Costs()
    try:
        found = msgspec.json.decode(raw, type=Costs)
    except (msgspec.DecodeError, RecursionError):
        return Costs()
    return found if found.format == FORMAT else Costs()


def replicas_of(path: str) -> tuple[str, ...]:
    """("p0", "d0") or ("d0",)."""
    return tuple(path.split(">"))


def identity(plan: Plan, path: str) -> str:
    """A digest of everything planned that what a path costs depends on, the weights aside."""
    told: list[object] = [_told(plan.replica(name)) for name in replicas_of(path)]
    told += [[pair.transport, pair.reason] for pair in plan.pairs if pair.path == path]
    raw = msgspec.json.encode(told, order="sorted")
    return hashlib.sha256(b"pdctl.cost.v1" + raw).hexdigest()[:32]


def _told(replica: ReplicaPlan) -> Sequence[object]:
    declared = replica.declared
    return (
        replica.engine,
        replica.host,
        replica.role,
        replica.compute_dtype,
        replica.data_host,
        declared.devices,
        declared.python,
        declared.env,
        declared.engine_config,
    )


def holds(record: PathRecord, plan: Plan, path: str, versions: tuple[str, ...] | None) -> bool:
    """Whether a record is of these very replicas; what isn't known (None) is not compared."""
    if any(name not in {r.name for r in plan.replicas} for name in replicas_of(path)):
        return False
    return (
        record.identity == identity(plan, path)
        and plan.contract_digest in (None, record.contract)
        and versions in (None, record.versions)
    )
