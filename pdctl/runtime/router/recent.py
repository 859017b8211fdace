"""The latest failed requests and the requests in flight, as `/status` shows them.

No prompt and no key is in here: a client's own mistakes are not kept, and an engine's free text,
which may quote what it was sent, stays in the logs.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from pdctl.errors import HANDOFF_CAUSES
from pdctl.runtime.router.advice import hint_for
from pdctl.runtime.router.failure import ENGINE_ERROR, RequestFailed, on_leg
from pdctl.runtime.router.policy import Path, shown
from pdctl.trace import monotonic_s

KEPT = 50
"""Kinds of failure, the latest ones."""

MESSAGE_CHARACTERS = 400


class FailedRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Failures of one kind: same path, leg, replica and cause. All but `count` and `first_at`
    are of the latest; times are Unix seconds."""

    at: float
    first_at: float
    count: int
    path: str | None
    room: str | None
    """A string: 62 bits are more than a JavaScript number holds."""
    leg: str | None
    replica: str | None
    status: int
    cause: str
    message: str
    hint: str | None


class RecentFailures:
    """A bounded list of failures by kind, so that one dead replica does not drive out the rest."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._kinds: OrderedDict[tuple[str | None, ...], FailedRequests] = OrderedDict()

    def add(self, failure: RequestFailed, at: float | None = None) -> None:
        """Keeps a failure that a replica or the cluster is to blame for; `at`: Unix seconds."""
        cause = failure.code or str(failure.status)
        if failure.is_clients and cause not in HANDOFF_CAUSES:
            return
        kind = (failure.path, failure.leg, failure.replica, cause)
        at = time.time() if at is None else at
        before = self._kinds.pop(kind, None)
        self._kinds[kind] = FailedRequests(
            at=at,
            first_at=before.first_at if before else at,
            count=before.count + 1 if before else 1,
            path=failure.path,
            room=None if failure.room is None else str(failure.room),
            leg=failure.leg,
            replica=failure.replica,
            status=failure.status,
            cause=cause,
            message=shown(_told(failure), MESSAGE_CHARACTERS),
            hint=hint_for(cause, self._cluster, failure.replica),
        )
        if len(self._kinds) > KEPT:
            self._kinds.popitem(last=False)

    def newest_first(self) -> tuple[FailedRequests, ...]:
        return tuple(reversed(self._kinds.values()))


def _told(failure: RequestFailed) -> str:
    if failure.code == ENGINE_ERROR and failure.replica is not None:
        return f"{on_leg(failure.leg or 'alone', failure.replica)}: its engine reported an error"
    return failure.message


class Tried(Protocol):
    """Of one try: whether prefill has answered."""

    @property
    def prefilled(self) -> bool: ...


class Flight(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One try of one request, from its first byte sent to its end; canaries too."""

    path: Path
    room: int | None
    began_s: float
    tried: Tried

    @property
    def age_s(self) -> float:
        return monotonic_s() - self.began_s


class Flights:
    """What runs now, in the order in which it began. Owned by the event loop."""

    def __init__(self) -> None:
        self._open: dict[int, Flight] = {}

    def __iter__(self) -> Iterator[Flight]:
        return iter(tuple(self._open.values()))

    @contextmanager
    def flying(self, path: Path, room: int | None, tried: Tried) -> Iterator[None]:
        flight = Flight(path=path, room=room, began_s=monotonic_s(), tried=tried)
        self._open[id(flight)] = flight
        try:
            yield
        finally:
            del self._open[id(flight)]
