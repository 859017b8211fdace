"""The life of one supervised process as a table. Pure: no I/O, no clock of its own.

If it affects what happens to a process, it is in `TABLE` or in `CrashBudget`. An event that
has no entry for a state changes nothing there, and is listed in `IGNORED`.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec


class State(enum.StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DETACHED = "detached"
    """It lives, and was ready, but its connection to the agent is away: it dials again."""
    STOPPING = "stopping"
    RESTARTING = "restarting"
    BACKOFF = "backoff"
    FAILED = "failed"


class Event(enum.StrEnum):
    START = "start"
    READY = "ready"
    DIFFERS = "differs"
    """It loaded something else than the contract says."""
    EXIT = "exit"
    LATE = "late"
    """The state's time is up."""
    CRASH_LOOP = "crash_loop"
    """EXIT or LATE for the last time that is allowed."""
    LOST = "lost"
    """Its connection to the agent ended."""
    STOP = "stop"
    RESTART = "restart"
    GONE = "gone"
    """KILL succeeded: nothing of it is left."""
    STUCK = "stuck"
    """KILL failed: the kernel does not end it."""
    RETRY = "retry"
    """The pause is over."""


class Action(enum.StrEnum):
    NOTHING = "nothing"
    SPAWN = "spawn"
    KILL = "kill"
    """End the process, its group, and what it left behind."""


class Step(NamedTuple):
    state: State
    action: Action


def _life(state: State) -> dict[tuple[State, Event], Step]:
    """What every state with a process has in common."""
    return {
        (state, Event.READY): Step(State.READY, Action.NOTHING),
        (state, Event.DIFFERS): Step(State.FAILED, Action.KILL),
        (state, Event.EXIT): Step(State.BACKOFF, Action.KILL),
        (state, Event.CRASH_LOOP): Step(State.FAILED, Action.KILL),
        (state, Event.STOP): Step(State.STOPPING, Action.KILL),
        (state, Event.RESTART): Step(State.RESTARTING, Action.KILL),
    }


TABLE: dict[tuple[State, Event], Step] = {
    (State.STOPPED, Event.START): Step(State.STARTING, Action.SPAWN),
    (State.STOPPED, Event.RESTART): Step(State.STARTING, Action.SPAWN),
    **_life(State.STARTING),
    (State.STARTING, Event.LATE): Step(State.BACKOFF, Action.KILL),
    **_life(State.READY),
    (State.READY, Event.LOST): Step(State.DETACHED, Action.NOTHING),
    **_life(State.DETACHED),
    (State.DETACHED, Event.LATE): Step(State.BACKOFF, Action.KILL),
    (State.STOPPING, Event.GONE): Step(State.STOPPED, Action.NOTHING),
    (State.STOPPING, Event.STUCK): Step(State.FAILED, Action.NOTHING),
    (State.RESTARTING, Event.GONE): Step(State.STARTING, Action.SPAWN),
    (State.RESTARTING, Event.STUCK): Step(State.FAILED, Action.NOTHING),
    (State.BACKOFF, Event.RETRY): Step(State.STARTING, Action.SPAWN),
    (State.BACKOFF, Event.START): Step(State.STARTING, Action.SPAWN),
    (State.BACKOFF, Event.RESTART): Step(State.STARTING, Action.SPAWN),
    (State.BACKOFF, Event.STOP): Step(State.STOPPED, Action.NOTHING),
    (State.BACKOFF, Event.STUCK): Step(State.FAILED, Action.NOTHING),
    (State.FAILED, Event.START): Step(State.STARTING, Action.SPAWN),
    (State.FAILED, Event.RESTART): Step(State.STARTING, Action.SPAWN),
    (State.FAILED, Event.STOP): Step(State.STOPPING, Action.KILL),
}

IGNORED: frozenset[tuple[State, Event]] = frozenset(
    (state, event) for state in State for event in Event if (state, event) not in TABLE
)

SETTLED = frozenset({State.STOPPED, State.FAILED})
"""States without a process (FAILED: or with one that can't be ended)."""

SHOWN = {
    State.DETACHED: "ready",
    State.RESTARTING: "stopping",
}
"""How a state reads in `MemberState`, where it is not its own name. A detached engine serves
as before: only its agent can't hear it."""


def shown(state: State, *, drained: bool = False) -> str:
    """As `MemberState` has it. A drained process that serves is "draining"."""
    word = SHOWN.get(state, state.value)
    return "draining" if drained and word == "ready" else word


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, and how often."""

    ready_s: float = 1800.0
    """From start to Ready: a big checkpoint from a slow disk."""
    reattach_s: float = 20.0
    """From a lost connection to the next Ready; attachments dial at least every 2 s."""
    stable_s: float = 5.0
    """Ready for this long: what came before is forgotten."""
    crashes: int = 5
    """Ends in a row, none of them after a stable time, that make a crash loop."""
    backoff_first_s: float = 0.5
    backoff_most_s: float = 30.0
    grace_s: float = 10.0
    """From SIGTERM to SIGKILL."""


class CrashBudget(msgspec.Struct, frozen=True, kw_only=True):
    """How often a process has ended in a row without ever having been stable."""

    crashes: int = 0

    def after_end(self, ready_for_s: float, limits: Limits) -> CrashBudget:
        """One more end; `ready_for_s` is how long it had been ready, 0 when never."""
        stable = ready_for_s >= limits.stable_s
        return CrashBudget(crashes=1 if stable else self.crashes + 1)

    def spent(self, limits: Limits) -> bool:
        return self.crashes >= limits.crashes

    def pause_s(self, limits: Limits) -> float:
        """Doubles with each end in a row."""
        exponent = min(max(0, self.crashes - 1), 30)
        return min(limits.backoff_most_s, limits.backoff_first_s * 2.0**exponent)


def state_limit_s(state: State, budget: CrashBudget, limits: Limits) -> float | None:
    """How long a state may last until LATE (or RETRY, for BACKOFF); None: for ever."""
    return {
        State.STARTING: limits.ready_s,
        State.DETACHED: limits.reattach_s,
        State.BACKOFF: budget.pause_s(limits),
    }.get(state)
