"""The router's picture of its replicas and paths: what the agent says, what canaries found,
and what the router saw itself. Owned by the event loop; nothing here waits but `changed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import msgspec

from pdctl.engines.channel import Failed, Members, MemberState, PairState
from pdctl.runtime.router.failure import on_leg
from pdctl.runtime.router.policy import Candidate, Path, declared_paths, pinnable_paths
from pdctl.topology.model import Role
from pdctl.topology.plan import Plan

ALIVE = frozenset({"ready", "draining"})
"""States in which a replica's running requests go on; only "ready" takes new ones."""


class Seat:
    """One incarnation of one replica. `lost` is set when it leaves; it never comes back:
    the next incarnation has a seat of its own."""

    def __init__(self, state: MemberState) -> None:
        self.state = state
        self.lost = anyio.Event()
        self.lost_cause = ""
        self.suspect: str | None = None
        """What the router saw (refused, reset, no answer to a probe), until it answers again."""
        self.active = 0
        """Requests of this router that run on it now."""

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def base_url(self) -> str:
        host = self.state.http_host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.state.http_port}"

    @property
    def sender(self) -> str:
        """Where its data plane listens, as it stands in a leg."""
        host = self.state.data_host
        host = f"[{host}]" if ":" in host else host
        return f"{host}:{self.state.data_port}"

    @property
    def closed_cause(self) -> str | None:
        """Why it takes no new request; None when it does."""
        if self.state.state != "ready":
            return f"{self.called}: {self.state.cause or f'it is {self.state.state}'}"
        return self.suspect

    @property
    def called(self) -> str:
        """By its leg and its name."""
        return on_leg("alone" if self.state.role is Role.BOTH else self.state.role, self.name)

    def lose(self, cause: str) -> None:
        if not self.lost.is_set():
            self.lost_cause = cause
            self.lost.set()

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Counts one request as active for the duration."""
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A canary's result; holds for these incarnations of the path's replicas only."""

    incarnations: tuple[int, ...]
    cause: str | None
    """None: it passed."""


class Roster:
    """Replicas by name, and the state of every declared path."""

    def __init__(self, plan: Plan) -> None:
        self.heard = False
        self.draining = False
        """Whether the router itself is to take no new request."""
        self._seats: dict[str, Seat] = {}
        self._verdicts: dict[Path, Verdict] = {}
        self._running: dict[Path, tuple[int, ...]] = {}
        self._failures: tuple[Failed, ...] = ()
        self._change = anyio.Event()
        self.adopt(plan)

    # -- what the agent says

    def adopt(self, plan: Plan) -> None:
        """Takes another plan; what it does not declare any more takes no new request."""
        self.plan = plan
        self.paths = declared_paths(plan)
        self.pinnable = pinnable_paths(plan)
        self._pairs = {Path(p.prefill, p.decode): p for p in plan.pairs}
        self._verdicts = {p: v for p, v in self._verdicts.items() if p in self.paths}
        self._notify()

    def update(self, members: Members) -> None:
        """Takes the agent's newest picture. Replicas that left "ready" lose their requests'
        legs at once; absent ones too."""
        self.heard = True
        self._failures = members.failures or self._failures
        self.draining = members.draining
        named = {state.name: state for state in members.members}
        for name, state in named.items():
            self._take(name, state)
        for name in [name for name in self._seats if name not in named]:
            self._seats.pop(name).lose(f"{name} left the cluster")
        self._notify()

    def _take(self, name: str, state: MemberState) -> None:
        """ "starting" of an incarnation that was ready is an agent that came back and waits
        for its replica to attach again: closed for new requests, running ones go on."""
        seat = self._seats.get(name)
        if seat is not None and seat.state.incarnation != state.incarnation:
            seat.lose(seat.state.cause or f"{name} was restarted")
            seat = None
        if seat is None or (seat.lost.is_set() and state.state in ALIVE):
            suspect = None if seat is None else seat.suspect
            seat = self._seats[name] = Seat(state)
            seat.suspect = suspect
        seat.state = state
        if state.state not in ALIVE and state.state != "starting":
            seat.lose(state.cause or f"{name} is {state.state}")

    # -- what the router saw

    def suspect(self, seat: Seat, cause: str) -> None:
        """A passive mark: no new request until a probe clears it. Running ones go on. Only a
        dead connection marks; no answer of an engine ever does (U20)."""
        if seat.suspect is None and self._seats.get(seat.name) is seat:
            seat.suspect = cause
            self._notify()

    def trust(self, seat: Seat) -> None:
        if seat.suspect is not None:
            seat.suspect = None
            self._notify()

    # -- canaries

    def begin_canary(self, path: Path) -> tuple[int, ...]:
        """Marks the path as being tried; returns the incarnations that the result holds for."""
        self._running[path] = self.incarnations(path)
        self._notify()
        return self._running[path]

    def end_canary(self, path: Path, verdict: Verdict | None) -> None:
        """None: it did not come to a result (an end went away)."""
        self._running.pop(path, None)
        if verdict is not None and path in self.paths:
            self._verdicts[path] = verdict
        self._notify()

    def verdict(self, path: Path) -> Verdict | None:
        """The result for the present incarnations; None where there is none yet."""
        found = self._verdicts.get(path)
        if found is None or found.incarnations != self.incarnations(path):
            return None
        return found

    def incarnations(self, path: Path) -> tuple[int, ...]:
        seats = (self._seats.get(name) for name in path.replicas)
        return tuple(-1 if seat is None else seat.state.incarnation for seat in seats)

    # -- questions

    def seat(self, name: str) -> Seat | None:
        return self._seats.get(name)

    def seats(self) -> tuple[Seat, ...]:
        """In the plan's order, then any other."""
        order = {replica.name: at for at, replica in enumerate(self.plan.replicas)}
        return tuple(
            sorted(self._seats.values(), key=lambda seat: order.get(seat.name, len(order)))
        )

    def closed_cause(self, path: Path) -> str | None:
        """Why the path's replicas cannot take a request, canary aside; None when they can."""
        for name in path.replicas:
            seat = self._seats.get(name)
            cause = f"the router has not heard of {name} yet" if seat is None else seat.closed_cause
            if cause is not None:
                return cause
        return None

    def state(self, path: Path) -> tuple[str, str | None]:
        """("waiting" | "canary" | "ready" | "failed", cause)."""
        cause = self.closed_cause(path)
        if cause is not None:
            return "waiting", cause
        if path not in self.paths:
            return "ready", None
        verdict = self.verdict(path)
        if verdict is None:
            tried = "its canary is running" if path in self._running else "its canary is due"
            return "canary", tried
        if verdict.cause is not None:
            return "failed", verdict.cause
        return "ready", None

    def ready(self) -> tuple[Path, ...]:
        return tuple(path for path in self.paths if self.state(path)[0] == "ready")

    def able(self) -> tuple[Path, ...]:
        """As `ready`, with each decode replica that can serve alone."""
        decoding = {path.decode for path in self.paths}
        alone = (p for p in self.pinnable if p not in self.paths and p.decode in decoding)
        return (*self.ready(), *(path for path in alone if self.state(path)[0] == "ready"))

    def candidate(self, path: Path) -> Candidate:
        loads = [0 if seat is None else seat.active for seat in map(self.seat, path.replicas)]
        return Candidate(
            path,
            prefill_load=loads[0] if path.prefill is not None else 0,
            decode_load=loads[-1],
        )

    def pair_states(self) -> tuple[PairState, ...]:
        return tuple(self._pair_state(p) for p in self.paths if p.prefill is not None)

    def replica_states(self) -> tuple[PairState, ...]:
        return tuple(self._pair_state(p) for p in self.paths if p.prefill is None)

    def transport(self, path: Path) -> str | None:
        """How a pair's pages move; None for a replica alone."""
        pair = self._pairs.get(path)
        return None if pair is None else pair.transport.value

    def _pair_state(self, path: Path) -> PairState:
        state, cause = self.state(path)
        pair = self._pairs.get(path)
        return PairState(
            prefill=path.prefill or path.decode,
            decode=path.decode,
            transport=self.transport(path) or "none",
            transport_reason="" if pair is None else pair.reason,
            state=state,
            cause=cause,
            incarnations=self.incarnations(path),
        )

    def active(self) -> dict[str, int]:
        """Replica → requests that run on it now."""
        return {seat.name: seat.active for seat in self.seats()}

    def drained(self) -> tuple[str, ...]:
        """Who is known to be draining: replicas, and "router" for the router itself."""
        names = [seat.name for seat in self.seats() if seat.state.state == "draining"]
        return (*names, "router") if self.draining else tuple(names)

    def failed(self, room: int) -> tuple[Failed, ...]:
        """What the engines themselves reported about a room, newest last."""
        return tuple(failure for failure in self._failures if failure.room == room)

    # -- waiting

    async def changed(self) -> None:
        """Until anything here changes; the caller bounds it or is cancelled."""
        await self._change.wait()

    def _notify(self) -> None:
        changed, self._change = self._change, anyio.Event()
        changed.set()
