"""Taking a replica, or the router, out of service without cutting a request.

The keeper sets the mark, the router obeys it and says so, and whoever asked waits until nothing
runs there. What is to be decided is decided on snapshots, without I/O.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from pdctl.errors import ClusterError, UsageError
from pdctl.runtime.agent.client import AgentCalls
from pdctl.runtime.agent.journal import ROUTER
from pdctl.runtime.agent.view import Snapshot
from pdctl.runtime.cluster.state import ClusterRecord
from pdctl.runtime.launch.progress import text_of
from pdctl.trace import monotonic_s

ASK_EVERY_S = 0.2

Told = Callable[[int], None]
"""How many requests still run there; called when the number changes."""


class StillActive(ClusterError):
    """Requests still ran when the time was up."""


def refuse_unknown(record: ClusterRecord, name: str, *, also: tuple[str, ...] = ()) -> None:
    """Raises UsageError, with the names that there are, where `name` is none of them."""
    known = (*(replica.name for replica in record.plan.replicas), *also)
    if name not in known:
        raise UsageError(
            f'cluster "{record.cluster}" has no replica "{name}"',
            hint=f"it has {', '.join(known)}",
        )


def closing(snapshot: Snapshot, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(ready paths that end at or go through a replica, ready paths that stay without it)."""
    ready = [p for p in (*snapshot.pairs, *snapshot.replicas) if p.state == "ready"]
    through = tuple(text_of(p) for p in ready if name in (p.prefill, p.decode))
    return through, tuple(text_of(p) for p in ready if name not in (p.prefill, p.decode))


def active(snapshot: Snapshot, name: str) -> int | None:
    """Requests that run on a drained replica, or through a drained router, as both the router
    and the engine count them; None while the router may still send new ones."""
    router = snapshot.router
    routes = router is not None and router.state in ("ready", "draining")
    if name == ROUTER:
        if router is None or not routes:
            return 0
        return router.requests_active if ROUTER in router.draining else None
    member = next(m for m in snapshot.members if m.name == name)
    if member.state not in ("ready", "draining"):
        return 0
    if router is None or not routes:
        return member.counters.requests_active
    if name not in router.draining:
        return None
    return max(router.active.get(name, 0), member.counters.requests_active)


async def wait_idle(
    keeper: AgentCalls, name: str, *, timeout_s: float, told: Told = lambda count: None
) -> None:
    """Waits until nothing runs on a drained replica (or through the router) any more.

    Raises:
        StillActive: requests still ran after `timeout_s`.
        AgentLost: the keeper does not answer.
    """
    until_s = monotonic_s() + timeout_s
    last: int | None = None
    while True:
        count = active(await keeper.snapshot(fresh=True), name)
        if count == 0:
            return
        if count is not None and count != last:
            told(count)
            last = count
        if monotonic_s() >= until_s:
            raise StillActive(f"{name}: {_running(last)} after {timeout_s:g} s")
        await anyio.sleep(min(ASK_EVERY_S, max(0.0, until_s - monotonic_s())))


def _running(count: int | None) -> str:
    if count is None:
        return "the router does not say what still runs"
    return f"{count} request{'' if count == 1 else 's'} still run{'s' if count == 1 else ''}"
