"""Which of several failures a client is told. Pure.

When one replica dies, the other one reports a lost peer, and often first. The client is told
the cause, not its echo.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdctl.errors import HandoffCancelled, HandoffExpired, PeerLost
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
