"""What the file may say but this version does not do yet: refused by name, in one table.

A version that gains one of these deletes its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import Engine, Policy, Role, Topology, Transport

NOT_YET = "not in this version"


class Hit(NamedTuple):
    """One place where a topology asks for something that is limited."""

    summary: str
    field: str
    replica: str | None = None


class Limit(NamedTuple):
    """One refusal: `find` is pure and returns the places that it applies to."""

    code: str
    find: Callable[[Topology], Iterable[Hit]]
    hint: str


def _transport(kind: Transport) -> Callable[[Topology], Iterable[Hit]]:
    def find(topology: Topology) -> Iterable[Hit]:
        if topology.handoff.transport is not kind:
            return
        for p in topology.replicas:
            for d in topology.replicas:
                if p.role is Role.PREFILL and d.role is Role.DECODE:
                    end = next((r for r in (p, d) if r.engine is Engine.MLX), None)
                    why = f"mlx can't do it ({end.name})" if end else NOT_YET
                    yield Hit(
                        f'pair "{p.name}" → "{d.name}": transport "{kind}" is impossible: {why}'
                        if end
                        else f'pair "{p.name}" → "{d.name}": transport "{kind}" is {why}',
                        "handoff.transport",
                    )

    return find


def _when(
    test: Callable[[Topology], bool], field: str, text: str
) -> Callable[[Topology], Iterable[Hit]]:
    return lambda topology: [Hit(f"{text} is {NOT_YET}", field)] if test(topology) else []


LIMITS: tuple[Limit, ...] = (
    Limit(
        "policy",
        _when(lambda t: t.router.policy is Policy.PREFIX, "router.policy", 'policy = "prefix"'),
        'write policy = "least_loaded" or "round_robin"',
    ),
)


def check(topology: Topology) -> list[Diagnostic]:
    """Every use of something that this version does not do."""
    return [
        Diagnostic(
            code=f"topology.unsupported_{limit.code}",
            summary=hit.summary,
            field=hit.field,
            replica=hit.replica,
            hint=limit.hint,
        )
        for limit in LIMITS
        for hit in limit.find(topology)
    ]
