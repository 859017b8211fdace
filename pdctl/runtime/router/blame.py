"""Which of several failures a client is told. Pure.

When one replica dies, the other one reports a lost peer, and often first. The client is told
the cause, not its echo.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdctl.engines.channel import Failed
from pdctl.errors import (
    HANDOFF_CAUSES,
    BudgetExceeded,
    HandoffCancelled,
    HandoffExpired,
    PeerLost,
    QueueFull,
)
from pdctl.runtime.router.failure import ENGINE_ERROR, RequestFailed, on_leg

ECHOES = frozenset({PeerLost.cause, HandoffCancelled.cause, HandoffExpired.cause})
"""Causes that may only mirror what happened on the other leg."""

STATUSES = {BudgetExceeded.cause: 400, QueueFull.cause: 503}
"""Of a failed handoff, by its cause; 502 for any other."""


def is_unexplained(failure: RequestFailed) -> bool:
    """The engine answered an error and not why, as vLLM does for every failed handoff; what it
    told its agent may say it."""
    return failure.code == ENGINE_ERROR


def is_echo(failure: RequestFailed) -> bool:
    return (failure.code in ECHOES or is_unexplained(failure)) and not failure.dead


def blame(failures: Sequence[RequestFailed]) -> RequestFailed:
    """The most telling one: a dead replica, then the client's own mistake, then a cause of
    its own, then an echo; the first of equals."""
    return min(failures, key=_rank)


def _rank(failure: RequestFailed) -> int:
    if failure.dead:
        return 0
    if failure.is_clients:
        return 1
    return 3 if is_echo(failure) else 2


def explained(failure: RequestFailed, reports: Sequence[Failed]) -> RequestFailed:
    """The failure with what an engine itself reported about the room, where the leg's own
    answer names no cause, or an echo."""
    names_a_cause = failure.code in HANDOFF_CAUSES and not is_echo(failure)
    report = _most_telling(failure, reports)
    if failure.is_clients or names_a_cause or report is None:
        return failure
    if is_unexplained(failure):
        return _caused(failure, report)
    return RequestFailed(
        failure.status,
        f"{failure.message}; {report.leg} reported {report.cause}: {report.detail}",
        code=report.cause if is_echo(failure) else failure.code,
        leg=failure.leg,
        replica=failure.replica,
        dead=failure.dead,
        stale=failure.stale,
    )


def _most_telling(failure: RequestFailed, reports: Sequence[Failed]) -> Failed | None:
    """The newest that is no echo, of the failed leg where it has one; of echoes, one that
    explains what would stay unexplained."""
    causes = [report for report in reports if report.cause not in ECHOES]
    if not causes and is_unexplained(failure):
        causes = list(reports)
    own = [report for report in causes if report.leg == failure.leg]
    found = own or causes
    return found[-1] if found else None


def _caused(failure: RequestFailed, report: Failed) -> RequestFailed:
    """What the leg would have answered, had its engine a way to say it."""
    status = STATUSES.get(report.cause, 502)
    said = report.detail
    if report.leg != failure.leg:
        said = f"{report.leg} reported {report.cause}: {said}"
    if status >= 500 and failure.leg and failure.replica:
        said = f"{on_leg(failure.leg, failure.replica)}: {said}"
    return RequestFailed(status, said, code=report.cause, leg=failure.leg, replica=failure.replica)
