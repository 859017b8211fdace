"""Which path a request takes, of those that are ready and whose engines honour it.

A pinned path is taken as it is. Otherwise pairs come before ordinary replicas, and the policy
picks; with `disaggregate = "auto"` the judge decides among all that can serve.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from pdctl.engines.interface import EngineSpec
from pdctl.engines.registry import spec_for
from pdctl.runtime.router.affinity import Affinity
from pdctl.runtime.router.delivery import Delivery
from pdctl.runtime.router.failure import RequestFailed
from pdctl.runtime.router.judge import Judge
from pdctl.runtime.router.members import Roster
from pdctl.runtime.router.policy import (
    Path,
    nothing_ready,
    pinned,
    preferred,
    unready,
)
from pdctl.runtime.router.request import Ask, objections
from pdctl.topology.model import Role

PASSING = frozenset({502, 503})
"""Of a pair's failure, what another path may not meet."""


class Chooser:
    """Chooses for one request after another.

    Args:
        decided: told (path, reason) of every request that was decided.
    """

    def __init__(
        self,
        roster: Roster,
        judge: Judge,
        affinity: Affinity,
        decided: Callable[[str, str], None],
    ) -> None:
        self._roster = roster
        self._judge = judge
        self._affinity = affinity
        self._tell = decided
        self._turns = itertools.count()

    def weighs(self, pin: str | None) -> bool:
        """Whether there is a choice, so that a prompt's pages may matter."""
        if pin is not None:
            return False
        return self._judge.decides or len(preferred(self._roster.ready())) > 1

    def pick(self, ask: Ask, pin: str | None, delivery: Delivery) -> Path:
        """The path of a first try.

        Raises:
            RequestFailed: there is none.
        """
        if pin is not None:
            path = pinned(pin, self._roster.pinnable)
            objection = objections(ask.body, path, self._specs(path))
            if objection is not None:
                raise objection
            state, cause = self._roster.state(path)
            if state != "ready":
                raise unready(path, cause or state)
            return path
        ready = self._roster.able() if self._judge.decides else self._roster.ready()
        if not ready:
            raise nothing_ready(
                (path, self._roster.state(path)[1] or "") for path in self._roster.paths
            )
        if self._judge.decides:
            return self._decide(ask, ready, delivery)
        return self._choose(ask, preferred(ready))

    def second(
        self,
        failure: RequestFailed,
        ask: Ask,
        pin: str | None,
        path: Path,
        delivery: Delivery,
    ) -> Path | None:
        """The path of a second try: the same one when only an idle connection had gone stale (its
        engine saw nothing, and the room is new). Where none is pinned, another one when a replica
        died: of the same kind, unless kinds are decided per request. Then a pair's handoff that
        failed is also made up for."""
        decides = self._judge.decides
        if failure.stale and self._roster.state(path)[0] == "ready":
            return path
        passes = decides and path.prefill is not None and failure.status in PASSING
        if pin is not None or not (failure.dead or passes):
            return None
        others = tuple(
            other
            for other in (self._roster.able() if decides else self._roster.ready())
            if other != path
            and (passes or failure.replica not in other.replicas)
            and (decides or (other.prefill is None) == (path.prefill is None))
        )
        try:
            if others and decides:
                return self._decide(ask, others, delivery)
            return self._choose(ask, others) if others else None
        except RequestFailed:
            return None

    def _decide(self, ask: Ask, paths: tuple[Path, ...], delivery: Delivery) -> Path:
        path, decision = self._judge.decide(ask, self._honouring(ask, paths))
        delivery.decided(decision.text)
        self._tell(decision.path, decision.reason)
        return path

    def _choose(self, ask: Ask, paths: tuple[Path, ...]) -> Path:
        candidates = [self._roster.candidate(path) for path in self._honouring(ask, paths)]
        return self._affinity.choose(ask, candidates, next(self._turns))

    def _honouring(self, ask: Ask, paths: tuple[Path, ...]) -> list[Path]:
        """Of these, those whose engines honour the body; RequestFailed(400) where none does."""
        objected = [(path, objections(ask.body, path, self._specs(path))) for path in paths]
        able = [path for path, objection in objected if objection is None]
        if not able:
            raise next(objection for _, objection in objected if objection is not None)
        return able

    def _specs(self, path: Path) -> list[tuple[EngineSpec, Role]]:
        roles = [Role.BOTH] if path.prefill is None else [Role.PREFILL, Role.DECODE]
        return [
            (spec_for(self._roster.plan.replica(name).engine), role)
            for name, role in zip(path.replicas, roles, strict=True)
        ]
