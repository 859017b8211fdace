"""What the router knows of its paths' costs, and what it decides by it.

Every request is timed, a pinned one and a canary too; with `disaggregate = "auto"` those that
are not pinned are decided. Owned by the event loop; nothing here waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from pdctl.engines.channel import RouterAssignment
from pdctl.handoff.counters import Histogram
from pdctl.runtime.cost.book import Book
from pdctl.runtime.cost.deciding import Decider, Decision, Option
from pdctl.runtime.cost.lengths import CHAT, TRIAL, Lengths, kind_of
from pdctl.runtime.cost.queues import Pending, Queues, Waits
from pdctl.runtime.cost.record import Costs, PathRecord, Sample, holds, identity
from pdctl.runtime.router.delivery import Delivery
from pdctl.runtime.router.members import Roster
from pdctl.runtime.router.policy import Path
from pdctl.runtime.router.purpose import Purpose
from pdctl.runtime.router.request import Ask
from pdctl.runtime.router.timed import Timed, Usage
from pdctl.topology.model import Disaggregate
from pdctl.trace import monotonic_s

KEPT = 20
CACHED_SHARE = 0.1
"""Of a prompt: a request of which an engine had more than this tells nothing of its length."""
MIN_STEPS = 3

Held = Callable[[str, Ask], int]
"""Tokens of a request's prompt that a replica holds already."""


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One decided request, as `/status` shows it."""

    at: float
    path: str
    reason: str
    prompt_tokens: int
    expected_ms: dict[str, float]


def nothing_held(replica: str, ask: Ask) -> int:
    return 0


class Judge:
    """Args:
    held: what replicas hold of a prompt; what they hold needs no computing.
    """

    def __init__(
        self, assignment: RouterAssignment, roster: Roster, held: Held = nothing_held
    ) -> None:
        self._roster = roster
        self._held = held
        self.queues = Queues()
        self.decider = Decider()
        self.lengths = Lengths()
        self.book = Book()
        self.recent: deque[Judged] = deque(maxlen=KEPT)
        self._identities: dict[str, str] = {}
        self._handoffs: dict[str, int] = {}
        """P → handoffs that it had counted at the last look."""
        self._sampled: dict[str, list[str]] = {}
        """P → paths of the samples since then, two of them: more than one tell nothing."""
        self.adopt(assignment)

    def adopt(self, assignment: RouterAssignment) -> None:
        """What holds from now on; records of paths that changed are dropped."""
        self._plan, self._contract = assignment.plan, assignment.contract.digest
        self.decides = assignment.disaggregate is Disaggregate.AUTO
        self._identities.clear()
        self.load(Costs(paths=self.book.records, lengths=self.lengths.known))

    def load(self, costs: Costs) -> None:
        """Takes what was stored, as far as it is of these replicas."""
        plan = self._plan
        self.book = Book({k: r for k, r in costs.paths.items() if holds(r, plan, k, None)})
        self.lengths = Lengths(costs.lengths)

    def costs(self) -> Costs:
        """What is to be stored."""
        return Costs(paths=self.book.records, lengths=self.lengths.known)

    # -- deciding

    def decide(self, ask: Ask, paths: Sequence[Path]) -> tuple[Path, Decision]:
        """Raises ValueError where there is no path."""
        tokens, now_s = self._tokens(ask), monotonic_s()
        options = [self._option(path, ask, tokens, now_s) for path in paths]
        decision = self.decider.decide(options, tokens)
        self.recent.append(
            Judged(
                at=time.time(),
                path=decision.path,
                reason=decision.reason,
                prompt_tokens=tokens,
                expected_ms={p: round(s * 1e3, 3) for p, s in decision.expected_s.items()},
            )
        )
        return next(path for path in paths if path.text == decision.path), decision

    def _option(self, path: Path, ask: Ask, tokens: int, now_s: float) -> Option:
        left = max(1, tokens - self._held(path.prefill or path.decode, ask))
        alone_s = self.book.expected_s(path.text, left, time.time())
        behind_s = None if alone_s is None else self.queues.waits(path.text, now_s).total_s(alone_s)
        return Option(
            path=path.text,
            total_s=behind_s,
            extrapolated=self.book.extrapolates(path.text, left),
        )

    def _tokens(self, ask: Ask) -> int:
        """Of its prompt: as it was read, else by its bytes."""
        return ask.prompt_tokens or self.lengths.tokens(ask.body)

    def expected_s(self, path: str, tokens: int) -> float | None:
        """On replicas that do nothing else, now."""
        return self.book.expected_s(path, tokens, time.time())

    # -- timing

    @contextmanager
    def timing(self, path: Path, ask: Ask, delivery: Delivery) -> Iterator[Timed]:
        """Times one try; what it took is kept where the block ends without an error."""
        name, tokens, now_s = path.text, self._tokens(ask), monotonic_s()
        waits = self.queues.waits(name, now_s)
        cost_s = self.expected_s(name, tokens) if self.decides else None
        tells = ask.stream or path.prefill is not None
        pending = self.queues.enter(name, tokens, cost_s or 0.0, now_s, tells=tells)
        timed = Timed(delivery, lambda: self.queues.first_token(pending, monotonic_s()))
        try:
            yield timed
            if timed.first_s is not None and not timed.has_recomputed:
                counted = self._learn(path, ask, timed)
                if ask.purpose is not Purpose.CANARY:
                    self._keep(path, timed, pending, waits, counted or pending.tokens)
        finally:
            self.queues.leave(pending, monotonic_s())

    def _learn(self, path: Path, ask: Ask, timed: Timed) -> int:
        """Tokens of the prompt as the engines counted them, 0 where they did not. Of the router's
        own chat nothing is learnt: it is too short to tell how long others' are."""
        counts = (_computed(path, timed), timed.usage)
        counted = next((u.prompt_tokens for u in counts if u is not None and u.prompt_tokens), 0)
        own = ask.purpose is not Purpose.CLIENT
        if counted and not (own and kind_of(ask.body) == CHAT):
            self.lengths.learn(ask.body, counted, TRIAL if own else None)
        return counted

    def _keep(self, path: Path, timed: Timed, pending: Pending, waits: Waits, tokens: int) -> None:
        self._open(path)
        self._keep_step(path, timed, pending)
        ttft_s = self._ttft_s(path, timed)
        computed = _computed(path, timed)
        cached = computed.cached_tokens if computed else 0
        if ttft_s is None or cached > CACHED_SHARE * tokens:
            return
        curve = self.book.curve(path.text) if self.decides else None
        if curve is not None:
            expected_s = waits.total_s(curve.at(tokens))
            self.book.seen(path.text, tokens, ttft_s, expected_s, time.time())
        if pending.quiet:
            sample = Sample(tokens=tokens, ttft_s=ttft_s, at=time.time())
            self.book.sampled(path.text, sample)
            if path.prefill is not None:
                since = self._sampled.setdefault(path.prefill, [])
                since[:] = [*since[-1:], path.text]
            if self.decides:  # fitted now, not while the next request waits for it
                self.book.curve(path.text)

    def _keep_step(self, path: Path, timed: Timed, pending: Pending) -> None:
        steps = _answered(timed) - 1
        if timed.streamed and pending.lone and steps >= MIN_STEPS and timed.first_s is not None:
            self.book.stepped(path.text, (timed.last_s - timed.first_s) / steps)

    def _ttft_s(self, path: Path, timed: Timed) -> float | None:
        """Of an answer that is not streamed, without what decoding took; None where that isn't
        known."""
        if timed.first_s is None:
            return None
        taken_s = timed.first_s - timed.began_s
        if timed.streamed:
            return taken_s
        steps = _answered(timed) - 1
        step_s = self.book.step_s(path.decode) if steps else 0.0
        if step_s is None or steps < 0 or steps * step_s > taken_s / 2:
            return None
        return taken_s - steps * step_s

    def _open(self, path: Path) -> None:
        name = path.text
        if name not in self._identities:
            self._identities[name] = identity(self._plan, name)
        fresh = PathRecord(
            identity=self._identities[name],
            contract=self._contract,
            versions=self.versions(path),
        )
        self.book.open(name, fresh)

    def versions(self, path: Path) -> tuple[str, ...]:
        """Of its replicas' engines; "" where one hasn't told."""
        seats = [self._roster.seat(replica) for replica in path.replicas]
        return tuple((s.state.engine_version if s else None) or "" for s in seats)

    # -- the engines' own account

    def look(self) -> None:
        """After fresh counters: round trips; and where just one handoff went through a prefill
        replica since the last look, its phases are those of that sample."""
        for seat in self._roster.seats():
            phases = seat.state.counters.phases
            prefill, transfer = (phases.get(name, Histogram()) for name in ("prefill", "transfer"))
            more = transfer.count - self._handoffs.get(seat.name, 0)
            self._handoffs[seat.name] = transfer.count
            sampled = self._sampled.pop(seat.name, [])
            if more == 1 and len(sampled) == 1 and prefill.count:
                self.book.explained(sampled[0], prefill.last_s, transfer.last_s)
            for peer, pair in seat.state.counters.pairs.items():
                if pair.round_trip_s is not None:
                    self.book.met(f"{peer}>{seat.name}", pair.round_trip_s)


def _computed(path: Path, timed: Timed) -> Usage | None:
    """What the replica says that computes the prompt."""
    return timed.usage if path.prefill is None else timed.prefill_usage


def _answered(timed: Timed) -> int:
    """Output tokens, as counted or, in a stream, as events."""
    counted = timed.usage.completion_tokens if timed.usage else None
    return counted or timed.events
