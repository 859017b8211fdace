from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.runtime.agent.lifecycle import (
    IGNORED,
    SETTLED,
    TABLE,
    Action,
    CrashBudget,
    Event,
    Limits,
    State,
    shown,
    state_limit_s,
)

LIVING = (State.STARTING, State.READY, State.DETACHED)
ENDING = (State.STOPPING, State.RESTARTING)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_every_pair_of_state_and_event_is_decided(state: State, event: Event) -> None:
    """Each (state, event) either has a step or is ignored, never both."""
    assert ((state, event) in TABLE) != ((state, event) in IGNORED)


@pytest.mark.parametrize("state", LIVING)
def test_whatever_ends_a_process_also_clears_it_away(state: State) -> None:
    """An exit, a disagreement, a stop and a restart all end in KILL: children may be left."""
    for event in (Event.EXIT, Event.CRASH_LOOP, Event.DIFFERS, Event.STOP, Event.RESTART):
        assert TABLE[state, event].action is Action.KILL


@pytest.mark.parametrize("state", LIVING)
def test_a_living_process_that_exits_is_tried_again(state: State) -> None:
    """U35, R61: a dead replica goes to backoff, and backoff ends in a start."""
    assert TABLE[state, Event.EXIT].state is State.BACKOFF
    assert TABLE[State.BACKOFF, Event.RETRY] == (State.STARTING, Action.SPAWN)


def test_only_starting_states_spawn() -> None:
    """SPAWN and STARTING come together, except for a process that is ready again."""
    for step in TABLE.values():
        assert (step.action is Action.SPAWN) <= (step.state is State.STARTING)


@pytest.mark.parametrize("event", Event)
def test_nothing_but_an_order_leaves_failed(event: Event) -> None:
    """A failed replica stays failed until somebody starts, restarts or stops it."""
    ordered = event in (Event.START, Event.RESTART, Event.STOP)
    assert ((State.FAILED, event) in TABLE) == ordered


@pytest.mark.parametrize("state", ENDING)
def test_a_process_that_is_ending_hears_only_its_end(state: State) -> None:
    """While it is being killed, a late Ready or a second stop changes nothing."""
    for event in Event:
        assert ((state, event) in TABLE) == (event in (Event.GONE, Event.STUCK))


def test_a_lost_connection_alone_restarts_nothing() -> None:
    """An engine outlives its agent's socket: it is detached, shown as ready, and has time."""
    assert TABLE[State.READY, Event.LOST] == (State.DETACHED, Action.NOTHING)
    assert shown(State.DETACHED) == "ready"
    assert state_limit_s(State.DETACHED, CrashBudget(), Limits()) is not None


@pytest.mark.parametrize("state", State)
def test_every_state_that_waits_for_a_process_has_a_deadline(state: State) -> None:
    """R6: starting, detached and backoff end by themselves; the others wait for nothing."""
    limited = state_limit_s(state, CrashBudget(), Limits()) is not None
    assert limited == (state in (State.STARTING, State.DETACHED, State.BACKOFF))
    if limited:
        event = Event.RETRY if state is State.BACKOFF else Event.LATE
        assert (state, event) in TABLE


@given(st.lists(st.sampled_from(list(Event)), max_size=40))
def test_a_stop_and_its_end_always_settle(events: list[Event]) -> None:
    """From wherever events lead, a stop and then the end of the process come to rest."""
    state = State.STOPPED
    for event in events:
        step = TABLE.get((state, event))
        state = step.state if step else state
    for event in (Event.GONE, Event.STOP, Event.GONE):
        step = TABLE.get((state, event))
        state = step.state if step else state
    assert state in SETTLED


def test_quick_ends_in_a_row_are_a_crash_loop() -> None:
    """Five ends without a stable time between them spend the budget."""
    limits, budget = Limits(), CrashBudget()
    for _ in range(limits.crashes - 1):
        budget = budget.after_end(0.0, limits)
        assert not budget.spent(limits)
    assert budget.after_end(limits.stable_s / 2, limits).spent(limits)


def test_a_stable_time_forgives_what_came_before() -> None:
    """A replica that served for a while and dies is tried again at once."""
    limits = Limits()
    budget = CrashBudget(crashes=limits.crashes - 1).after_end(limits.stable_s, limits)
    assert budget.crashes == 1
    assert budget.pause_s(limits) == limits.backoff_first_s


@given(st.integers(0, 10_000))
def test_pauses_double_up_to_a_bound(crashes: int) -> None:
    """Never under the first pause, never above the longest, never shorter than before."""
    limits = Limits()
    pause = CrashBudget(crashes=crashes).pause_s(limits)
    assert limits.backoff_first_s <= pause <= limits.backoff_most_s
    assert pause <= CrashBudget(crashes=crashes + 1).pause_s(limits)
