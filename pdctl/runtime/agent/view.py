"""What one agent knows of its cluster, with a version that rises at every change.

The router gets it pushed, `up` and `ps` ask for it; both wait for the next version instead of
asking again and again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import anyio
import msgspec

from pdctl.engines.channel import Failed, Members, MemberState, PairState, PairStates
from pdctl.handoff.counters import Counters
from pdctl.handoff.store.shelves import StoreCounts
from pdctl.runtime.agent.stores import StoreState

KEPT_FAILURES = 256
"""The latest failed handoffs that the router can name a cause from."""

NO_COUNTS = Counters()
NO_REQUESTS: dict[str, Any] = {
    "requests_active": 0,
    "requests_total": 0,
    "requests_failed": 0,
    "active": {},
    "draining": (),
}


class RouterState(msgspec.Struct, frozen=True, kw_only=True):
    """The router as its agent sees it; states as in MemberState."""

    state: str
    cause: str | None = None
    pid: int | None = None
    started_at: float | None = None
    restarts: int = 0
    url: str | None = None
    requests_active: int = 0
    requests_total: int = 0
    requests_failed: int = 0
    active: dict[str, int] = {}
    draining: tuple[str, ...] = ()
    """Both as in RouterReport."""


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """Another host, as the keeper sees it.

    state: "connecting" | "starting" (its agent) | "ready" | "unreachable"
    """

    name: str
    state: str
    cause: str | None = None
    round_trip_s: float | None = None
    clock_offset_s: float | None = None
    """Its clock minus the keeper's."""
    agent_restarts: int = 0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's whole picture, as it travels to `up` and `ps`."""

    host: str
    run: str
    version: int
    members: tuple[MemberState, ...]
    router: RouterState | None
    """None on a host without the router."""
    pairs: tuple[PairState, ...] = ()
    replicas: tuple[PairState, ...] = ()
    """Ordinary replicas' canaries."""
    hosts: tuple[HostState, ...] = ()
    """Every host but this one; empty but on the keeper."""
    failures: tuple[Failed, ...] = ()
    """The latest failed handoffs on this host, newest last."""
    stores: tuple[StoreState, ...] = ()
    """This host's page store; on the keeper every host's."""


class View:
    """Members, pairs and failures. Everything here belongs to the event loop."""

    def __init__(self) -> None:
        self.version = 1
        self.members: tuple[MemberState, ...] = ()
        self.router: RouterState | None = None
        self.hosts: tuple[HostState, ...] = ()
        self.announced = PairStates(url="", pairs=())
        self.stores: tuple[StoreState, ...] = ()
        self.elsewhere: tuple[Failed, ...] = ()
        """Other hosts' failures, as last heard."""
        self._failures: deque[Failed] = deque(maxlen=KEPT_FAILURES)
        self._changed = anyio.Event()

    def update(
        self,
        members: tuple[MemberState, ...],
        router: RouterState | None,
        hosts: tuple[HostState, ...] = (),
        elsewhere: tuple[Failed, ...] = (),
        stores: tuple[StoreState, ...] = (),
    ) -> None:
        """Takes the present picture. Counters and measurements alone make no new version:
        whoever wants those asks."""
        before = self._telling()
        self.members, self.router = members, router
        self.hosts, self.elsewhere, self.stores = hosts, elsewhere, stores
        if self._telling() != before:
            self._bump()

    def _telling(self) -> object:
        replace = msgspec.structs.replace
        hosts = (replace(h, round_trip_s=None, clock_offset_s=None) for h in self.hosts)
        stores = (replace(s, counts=StoreCounts()) for s in self.stores)
        shown = _without_counts(self.members, self.router)
        return shown, tuple(hosts), self.elsewhere, tuple(stores)

    def announce(self, states: PairStates) -> None:
        if states != self.announced:
            self.announced = states
            self._bump()

    def failed(self, failure: Failed) -> None:
        """A handoff failed on one of this host's replicas; what it says is cut to size."""
        short = msgspec.structs.replace(failure, detail=failure.detail[:500])
        self._failures.append(short)
        self._bump()

    def message(self, seq: int = 0) -> Members:
        """As the router is told."""
        return Members(
            version=self.version,
            members=self.members,
            failures=(*self.elsewhere, *self._failures),
            seq=seq,
            draining=self.router is not None and self.router.state == "draining",
        )

    def snapshot(self, host: str, run: str) -> Snapshot:
        router = self.router
        if router is not None and self.announced.url:
            router = msgspec.structs.replace(router, url=self.announced.url)
        return Snapshot(
            host=host,
            run=run,
            version=self.version,
            members=self.members,
            router=router,
            pairs=self.announced.pairs,
            replicas=self.announced.replicas,
            hosts=self.hosts,
            failures=tuple(self._failures),
            stores=self.stores,
        )

    async def changed(self, after: int) -> None:
        """Waits for a version above `after`. Unbounded: put a deadline around it."""
        while self.version <= after:
            await self._changed.wait()

    def _bump(self) -> None:
        self.version += 1
        self._changed.set()
        self._changed = anyio.Event()


def _without_counts(members: tuple[MemberState, ...], router: RouterState | None) -> object:
    replace = msgspec.structs.replace
    return (
        tuple(replace(member, counters=NO_COUNTS) for member in members),
        router and replace(router, **NO_REQUESTS),
    )


def encode(value: msgspec.Struct) -> bytes:
    """As it crosses an actor call: JSON, so that neither end unpickles the other's types."""
    return msgspec.json.encode(value)


def decode(raw: bytes, kind: type[Any]) -> Any:
    return msgspec.json.decode(raw, type=kind)
