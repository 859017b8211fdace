"""The router's `/status` before and after a turn, and what moved in between. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdctl.errors import PdctlError
from pdctl.handoff.counters import PHASES
from pdctl.runtime.bench.columns import Column, Required

_COUNTED = ("imported_tokens", "host_bytes", "gpu_bytes", "handoffs_completed", "handoffs_failed")


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    sum_s: float


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`/status` as a sweep reads it: entries by replica and by path."""

    cluster: str
    replicas: dict[str, dict[str, Any]]
    pairs: dict[str, dict[str, Any]]

    @property
    def versions(self) -> dict[str, str]:
        """Engine and version per replica, where the router knows them."""
        return {
            name: f"{entry.get('engine')} {entry['engine_version']}"
            for name, entry in self.replicas.items()
            if entry.get("engine_version")
        }


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """What one turn moved on its column; `foreign_handoffs` finished on other pairs meanwhile."""

    imported_tokens: int
    host_bytes: int
    gpu_bytes: int
    handoffs_completed: int
    handoffs_failed: int
    foreign_handoffs: int
    phases: dict[str, Phase] = {}

    @property
    def restarted(self) -> bool:
        """A counter went backwards: a replica was started anew in between."""
        return min(self.imported_tokens, self.host_bytes, self.handoffs_completed) < 0


def read_status(body: bytes) -> Status:
    """Decodes an answer of `/status`; PdctlError where it is not one."""
    try:
        raw = msgspec.json.decode(body)
        replicas = {entry["name"]: entry for entry in raw["replicas"]}
        pairs = {f"{entry['prefill']}>{entry['decode']}": entry for entry in raw["pairs"]}
        return Status(cluster=raw["cluster"], replicas=replicas, pairs=pairs)
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise PdctlError(f"the router's /status cannot be read: {error}") from error


def not_ready(status: Status, column: Column) -> str | None:
    """Why a column cannot be measured now, or None."""
    names = [name for name in (column.prefill, column.decode) if name is not None]
    for name in names:
        entry = status.replicas.get(name)
        if entry is None:
            return f"the router knows no replica {name!r}"
        if entry.get("state") != "ready":
            return _state_sentence(f"replica {name!r}", entry)
    if column.is_pair:
        pair = status.pairs.get(column.path)
        if pair is None:
            return f"the router knows no pair {column.path!r}"
        if pair.get("state") != "ready":
            return _state_sentence(f"pair {column.path!r}", pair)
    return None


def moved(before: Status, after: Status, column: Column) -> Moved:
    """Counters of the column's pair (of its replica, where it serves alone), after − before."""
    if column.is_pair:
        old, new = before.pairs.get(column.path, {}), after.pairs.get(column.path, {})
    else:
        old, new = before.replicas.get(column.path, {}), after.replicas.get(column.path, {})
    change = {name: _number(new, name) - _number(old, name) for name in _COUNTED}
    foreign = sum(
        _number(entry, "handoffs_completed")
        - _number(before.pairs.get(path, {}), "handoffs_completed")
        for path, entry in after.pairs.items()
        if path != column.path
    )
    return Moved(
        **change,
        foreign_handoffs=max(0, foreign),
        phases=_phases(before, after, column) if column.is_pair else {},
    )


def as_required(change: Moved, required: Required, requests: int) -> bool:
    """Whether `requests` requests moved exactly what they had to."""
    wanted = (
        (change.imported_tokens, required.imported_tokens),
        (change.host_bytes, required.host_bytes),
        (change.gpu_bytes, required.gpu_bytes),
    )
    return all(need is None or got == need * requests for got, need in wanted)


def _phases(before: Status, after: Status, column: Column) -> dict[str, Phase]:
    found: dict[str, Phase] = {}
    for name in (column.prefill, column.decode):
        old, new = (s.replicas.get(name or "", {}).get("phases", {}) for s in (before, after))
        for phase in PHASES:
            if phase not in new:
                continue
            count = _count(new[phase]) - _count(old.get(phase, {}))
            sum_s = new[phase].get("sum_s", 0.0) - old.get(phase, {}).get("sum_s", 0.0)
            if count > 0:
                found[phase] = Phase(count=count, sum_s=sum_s)
    return found


def _count(histogram: Mapping[str, Any]) -> int:
    return int(sum(histogram.get("counts", ())))


def _number(entry: Mapping[str, Any], name: str) -> int:
    return int(entry.get(name) or 0)


def _state_sentence(subject: str, entry: Mapping[str, Any]) -> str:
    cause = entry.get("cause")
    return f"{subject} is {entry.get('state', 'unknown')}" + (f": {cause}" if cause else "")
