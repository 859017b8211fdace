"""The state tables, and that nothing else is possible."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdctl.errors import ProtocolViolation
from pdctl.handoff import diagram, state
from pdctl.handoff.state import (
    RECEIVER,
    RECEIVER_FINAL,
    RECEIVER_LOCAL,
    SENDER,
    SENDER_FINAL,
    SENDER_LOCAL,
    Event,
    LocalProtocolError,
    Receiving,
    Sending,
)

SIDES = [
    *((state.sending, SENDER, SENDER_LOCAL, each, event) for each in Sending for event in Event),
    *(
        (state.receiving, RECEIVER, RECEIVER_LOCAL, each, event)
        for each in Receiving
        for event in Event
    ),
]


@pytest.mark.parametrize(
    ("make", "table", "local", "before", "event"),
    SIDES,
    ids=[f"{type(side[3]).__name__}-{side[3].value}-{side[4].value}" for side in SIDES],
)
def test_every_pair(make, table, local, before, event):
    """R28: whatever is not in the table raises, by whose fault it is, and changes nothing."""
    machine = make(before)
    if (before, event) in table:
        assert machine.on(event) is table[before, event] is machine.state
        return
    with pytest.raises(LocalProtocolError if event in local else ProtocolViolation):
        machine.on(event)
    assert machine.state is before


def test_final_states_have_no_way_out():
    """R15, R16: a handoff ends once and is not revived."""
    assert not [key for key in SENDER if key[0] in SENDER_FINAL]
    assert not [key for key in RECEIVER if key[0] in RECEIVER_FINAL]


def test_every_state_can_fail_until_it_is_final():
    """R6: there is no state that can't be left by a failure."""
    assert {key[0] for key in SENDER if key[1] is Event.FAIL} == set(Sending) - SENDER_FINAL
    assert {k[0] for k in RECEIVER if k[1] is Event.FAIL} == set(Receiving) - RECEIVER_FINAL


@pytest.mark.parametrize(("table", "start"), [(SENDER, Sending.NEW), (RECEIVER, Receiving.NEW)])
def test_every_state_is_reachable(table, start):
    """A table has no dead entry."""
    seen, todo = {start}, [start]
    while todo:
        here = todo.pop()
        after = {table[key] for key in table if key[0] is here} - seen
        seen |= after
        todo += after
    assert seen == set(type(start))


@pytest.mark.parametrize(
    ("table", "done", "last"),
    [(SENDER, Sending.DONE, Event.DONE), (RECEIVER, Receiving.DONE, Event.DONE)],
)
def test_only_done_is_done(table, done, last):
    """U29: one event alone leads to success, and it is Done."""
    assert {key[1] for key in table if table[key] is done} == {last}


def test_the_diagram_is_fresh():
    """docs/handoff-states.md is what the tables say."""
    path = Path(__file__).parents[2] / "docs" / "handoff-states.md"
    assert path.read_text(encoding="utf-8") == diagram.render()
