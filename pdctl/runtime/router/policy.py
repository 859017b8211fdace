"""Which path a request takes. Pure: no I/O, no clock, no state of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from pdctl.runtime.router.endpoints import PATH_HEADER
from pdctl.runtime.router.failure import RequestFailed, refused
from pdctl.topology.model import Engine, Policy, Role
from pdctl.topology.plan import Plan

SERVES_ALONE = frozenset({Engine.MLX, Engine.VLLM})
"""Engines whose replicas can answer a whole request in any role (DESIGN §7)."""


class Path(msgspec.Struct, frozen=True):
    """Prefill and decode replica, or one replica that does it alone (`prefill` is None)."""

    prefill: str | None
    decode: str

    @property
    def text(self) -> str:
        return self.decode if self.prefill is None else f"{self.prefill}>{self.decode}"

    @property
    def replicas(self) -> tuple[str, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


class Candidate(msgspec.Struct, frozen=True):
    """A path that could take the request, and the requests that its ends run now."""

    path: Path
    prefill_load: int = 0
    decode_load: int = 0


def declared_paths(plan: Plan) -> tuple[Path, ...]:
    """Every path of a plan that may ever take traffic: its pairs, then ordinary replicas."""
    pairs = tuple(Path(pair.prefill, pair.decode) for pair in plan.pairs)
    alone = tuple(Path(None, r.name) for r in plan.replicas if r.role is Role.BOTH)
    return pairs + alone


def pinnable_paths(plan: Plan) -> tuple[Path, ...]:
    """Declared paths, and every other replica that could serve alone: it takes only traffic
    that is pinned to it, so it needs no canary of its own."""
    lone = tuple(
        Path(None, r.name)
        for r in plan.replicas
        if r.role is not Role.BOTH and r.engine in SERVES_ALONE
    )
    return declared_paths(plan) + lone


def preferred(ready: Iterable[Path]) -> tuple[Path, ...]:
    """`disaggregate = "always"`: pairs take what is not pinned; ordinary replicas take it
    where no pair can, so that a dead pair never idles a healthy replica (R71)."""
    found = tuple(ready)
    return tuple(path for path in found if path.prefill is not None) or found


def choose(candidates: Sequence[Candidate], policy: Policy, turn: int) -> Path:
    """The path of request number `turn`; ties of least_loaded go round.

    Raises:
        ValueError: there is no candidate.
    """
    if not candidates:
        raise ValueError("no candidate")
    start = turn % len(candidates)
    if policy is Policy.ROUND_ROBIN:
        return candidates[start].path
    rotated = [*candidates[start:], *candidates[:start]]
    return min(rotated, key=_load).path


def _load(candidate: Candidate) -> tuple[int, int]:
    busiest = max(candidate.prefill_load, candidate.decode_load)
    return busiest, candidate.prefill_load + candidate.decode_load


def pinned(header: str, paths: Iterable[Path]) -> Path:
    """The declared path that a client's `x-pdctl-path` names.

    Raises:
        RequestFailed: 400, it names none.
    """
    wanted = header.strip()
    known = {path.text: path for path in paths}
    if wanted in known:
        return known[wanted]
    offered = ", ".join(known) or "none"
    raise refused(
        f'{PATH_HEADER}: "{shown(wanted)}" is no path of this cluster; paths are: {offered}',
        param=PATH_HEADER,
        code="unknown_path",
    )


def unready(path: Path, cause: str) -> RequestFailed:
    """503 for a path that exists and cannot take traffic now."""
    failure = RequestFailed(503, f"path {path.text} is not ready: {cause}", code="path_not_ready")
    failure.path = path.text
    return failure


def nothing_ready(causes: Iterable[tuple[Path, str]]) -> RequestFailed:
    """503 that says of every path why it cannot serve."""
    reasons = "; ".join(f"{path.text}: {cause}" for path, cause in causes)
    return RequestFailed(
        503, f"no path can serve now ({reasons or 'no replicas yet'})", code="nothing_ready"
    )


def shown(text: str, limit: int = 64) -> str:
    """Foreign text for a message: printable, bounded."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return clean if len(clean) <= limit else clean[:limit] + "…"
