"""Prompts that each replica has still to compute, as the router knows them.

A prompt waits on the replica that computes it: P of a pair, or the one that serves alone. A
replica computes one prompt's worth at a time, whatever its scheduler interleaves, so a new one
waits for what is left of all before it. Whether a prompt is over shows at its first token; of an
answer that comes whole it is taken to be over when its expected time has passed. The decode end
of a pair computes nothing of the prompt, but its first step waits for prompts that the engine is
busy with.

Owned by the event loop; the clock (any, in seconds) is passed in.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pdctl.runtime.cost.record import replicas_of

OVERDUE = 0.1
"""Share of its cost that a prompt which takes longer than expected has still to go."""


class Pending(msgspec.Struct, eq=False):
    """One request from its start to its end."""

    path: str
    tokens: int
    cost_s: float
    """Of computing its prompt, expected."""
    began_s: float
    """When its turn began."""
    tells: bool = True
    """Whether its first token shows: an answer that is not streamed comes whole."""
    prompted: bool = False
    """Its first token has come."""
    quiet: bool = True
    """No other request ran on its replicas before its first token."""
    lone: bool = True
    """None did in all its life so far."""

    @property
    def computes_on(self) -> str:
        return replicas_of(self.path)[0]


class Waits(NamedTuple):
    """What a request on some path waits for, as of one moment; seconds."""

    computing_s: float
    """For the replica that computes its prompt."""
    decode_s: float
    """For the decode replica of a pair, meanwhile."""

    def total_s(self, alone_s: float) -> float:
        """The time to the first token of one that takes `alone_s` where nothing waits."""
        return max(self.computing_s + alone_s, self.decode_s)


class Queues:
    """Requests in flight."""

    def __init__(self) -> None:
        self._flying: list[Pending] = []

    def enter(
        self, path: str, tokens: int, cost_s: float, now_s: float, *, tells: bool = True
    ) -> Pending:
        """A request starts; whoever calls this calls `leave`."""
        new = Pending(path, tokens, cost_s, now_s, tells)
        for other in self._flying:
            if not set(replicas_of(path)).isdisjoint(replicas_of(other.path)):
                new.quiet = new.lone = other.lone = False
                other.quiet = other.quiet and other.prompted
        self._flying.append(new)
        return new

    def first_token(self, pending: Pending, now_s: float) -> None:
        """Its prompt is computed, or will not be; the next one's turn begins."""
        if not pending.prompted:
            waiting = self._waiting(pending.computes_on)
            pending.prompted = True
            if waiting[:1] == [pending] and len(waiting) > 1:
                waiting[1].began_s = now_s

    def leave(self, pending: Pending, now_s: float) -> None:
        self.first_token(pending, now_s)
        self._flying = [other for other in self._flying if other is not pending]

    def prompt_tokens(self, replica: str) -> int:
        """Of the prompts that it has still to compute."""
        return sum(p.tokens for p in self._waiting(replica))

    def wait_s(self, replica: str, now_s: float) -> float:
        """Until it has computed the prompts that it has."""
        waiting = self._waiting(replica)
        if not waiting:
            return 0.0
        first, *others = waiting
        behind_s, spent_s, least_s = (
            sum(p.cost_s for p in others),
            now_s - first.began_s,
            OVERDUE * first.cost_s,
        )
        if not first.tells:
            return max(first.cost_s + behind_s - spent_s, least_s)
        return max(first.cost_s - spent_s, least_s) + behind_s

    def waits(self, path: str, now_s: float) -> Waits:
        computing, *decode = replicas_of(path)
        decode_s = max((self.wait_s(name, now_s) for name in decode), default=0.0)
        return Waits(self.wait_s(computing, now_s), decode_s)

    def _waiting(self, replica: str) -> list[Pending]:
        return [p for p in self._flying if not p.prompted and p.computes_on == replica]
