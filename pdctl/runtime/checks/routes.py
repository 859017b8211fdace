"""Whether the keeper, on the router's host, will reach every other host by its own SSH."""

from __future__ import annotations

from typing import Protocol, cast

from pdctl.errors import HostError
from pdctl.runtime.checks.ground import Ground
from pdctl.runtime.hosts.ssh import by_hand
from pdctl.runtime.hosts.survey import HostFacts
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import Host


class Router(Protocol):
    def route(self, declared: Host) -> HostFacts:
        """What this host sees of another over its own SSH. HostError where it can't."""
        ...


def check_routes(ground: Ground) -> list[Diagnostic]:
    """Nothing where the router runs here: then our own connections are the proof. Where it
    runs elsewhere, each host is reached from there, with that user's configuration and keys."""
    at = ground.topology.router.host
    if not ground.is_far(at) or at in ground.lost:
        return []
    keeper = cast(Router, ground.hosts[at])
    names = [name for name in ground.reached if name != at and ground.is_far(name)]

    def one(name: str) -> Diagnostic | None:
        ground.watcher.host(at, f"reaching {name} by SSH")
        try:
            keeper.route(ground.topology.hosts[name])
        except HostError as error:
            return _unreached(ground, at, name, error)
        return None

    return [problem for problem in ground.together(one, names) if problem is not None]


def _unreached(ground: Ground, at: str, name: str, error: HostError) -> Diagnostic:
    there, beyond = (by_hand(ground.topology.hosts[n]) for n in (at, name))
    hint = f"`{there} {beyond} true` must work without a question"
    why = error.message.removeprefix(f'host "{name}": ')
    return Diagnostic(
        code="host.route",
        summary=f'host "{at}", where the router runs, can\'t reach host "{name}": {why}',
        detail=error.hint,
        field=f"hosts.{name}.ssh",
        hint=hint,
    )
