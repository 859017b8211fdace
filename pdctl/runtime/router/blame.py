"""Which of several failures a client is told. Pure.

When one replica dies, the other one reports a lost peer, and often first. The client is told
the cause, not its echo.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdctl.engines.channel import Failed
from pdctl.errors import HANDOFF_CAUSES, HandoffCancelled, HandoffExpired, PeerLost
from pdctl.runtime.router.failure import RequestFailed

ECHOES = frozenset({PeerLost.cause, HandoffCancelled.cause, HandoffExpired.cause})
"""Causes that may only mirror what happened on the other leg."""


def is_echo(failure: RequestFailed) -> bool:
    return failure.code in ECHOES and not failure.dead


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
    causes = [report for report in reports if report.cause not in ECHOES]
    if failure.is_clients or names_a_cause or not causes:
        return failure
    report = causes[-1]
    return RequestFailed(
        failure.status,
        f"{failure.message}; {report.leg} reported {report.cause}: {report.detail}",
        code=report.cause if is_echo(failure) else failure.code,
        leg=failure.leg,
        replica=failure.replica,
        dead=failure.dead,
        stale=failure.stale,
    )
