"""Rules about who answers a request without a handoff: prefill and decode replicas of sglang do
not, all others do.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdctl.topology.diagnostics import Diagnostic, Severity
from pdctl.topology.model import Disaggregate, Engine, OnFailure, Replica, Role, Topology


def baseline(topology: Topology) -> Iterable[Diagnostic]:
    """Says that no replica could answer a request alone."""
    if topology.replicas and all(_is_half(r) for r in topology.replicas):
        yield Diagnostic(
            severity=Severity.WARNING,
            code="topology.no_baseline",
            summary="no replica answers a request alone: prefill and decode replicas of sglang "
            "do not",
            field="replicas",
            hint='add an ordinary replica (role = "both"): bench compares with it, and requests '
            "go there when no pair can serve",
        )


def recompute(topology: Topology) -> Iterable[Diagnostic]:
    """An SGLang decode replica never computes a prompt, so it can't recompute one."""
    if topology.handoff.on_failure is not OnFailure.RECOMPUTE:
        return
    for i, r in enumerate(topology.replicas):
        if _is_half(r) and r.role is Role.DECODE:
            yield Diagnostic(
                code="topology.no_recompute",
                summary=f'replica "{r.name}": on_failure = "recompute" is impossible, because a '
                "decode replica of sglang computes no prompt",
                field=f"replicas[{i}].engine",
                replica=r.name,
                hint='write on_failure = "error" and add an ordinary replica (role = "both") of '
                "the model: requests go there when no pair can serve",
            )


def decisions(topology: Topology) -> Iterable[Diagnostic]:
    """`disaggregate = "auto"` needs pairs, and somebody who answers without one."""
    if topology.router.disaggregate is not Disaggregate.AUTO or not topology.replicas:
        return
    decode = [r for r in topology.replicas if r.role is Role.DECODE]
    if not decode:
        yield Diagnostic(
            severity=Severity.WARNING,
            code="topology.nothing_to_decide",
            summary='router: disaggregate = "auto" decides nothing, because there is no pair',
            field="router.disaggregate",
            hint="leave disaggregate away",
        )
    elif all(_is_half(r) for r in (*decode, *_ordinary(topology))):
        yield Diagnostic(
            code="topology.nobody_alone",
            summary='router: disaggregate = "auto" is impossible, because no replica answers a '
            "request alone: decode replicas of sglang do not",
            field="router.disaggregate",
            hint='add an ordinary replica (role = "both") of the model, or write '
            'disaggregate = "always"',
        )


def _ordinary(topology: Topology) -> list[Replica]:
    return [r for r in topology.replicas if r.role is Role.BOTH]


def _is_half(replica: Replica) -> bool:
    return replica.engine is Engine.SGLANG and replica.role is not Role.BOTH
