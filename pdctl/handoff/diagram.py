"""Draws docs/handoff-states.md from the tables: `python -m pdctl.handoff.diagram PATH`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from pdctl.handoff.state import (
    RECEIVER,
    RECEIVER_FINAL,
    RECEIVER_LOCAL,
    SENDER,
    SENDER_FINAL,
    SENDER_LOCAL,
    Event,
    Receiving,
    Sending,
    State,
)

HEAD = """# States of a handoff

Generated from `pdctl/handoff/state.py` by `python -m pdctl.handoff.diagram docs/handoff-states.md`;
a test fails while it is stale. Capitalised events are messages on the wire; `*` marks those that
this end causes itself. Whatever is not drawn or listed here is an error: `LocalProtocolError`
where this end caused it, `ProtocolViolation` where the peer did.
"""

LISTED = (Event.RENEW, Event.ABORT, Event.FAIL)
"""Too many edges to draw."""


def render() -> str:
    """The whole file."""
    sender = _section("Sender (prefill)", Sending, SENDER, SENDER_LOCAL, SENDER_FINAL)
    receiver = _section("Receiver (decode)", Receiving, RECEIVER, RECEIVER_LOCAL, RECEIVER_FINAL)
    return "\n".join((HEAD, sender, receiver))


def _section(
    title: str,
    states: Iterable[State],
    table: Mapping[tuple[State, Event], State],
    local: frozenset[Event],
    final: frozenset[State],
) -> str:
    lines = [f"## {title}", "", "```mermaid", "stateDiagram-v2", "    [*] --> new"]
    for (before, event), after in table.items():
        if event not in LISTED:
            mark = "*" if event in local else ""
            lines.append(f"    {before.value} --> {after.value} : {event.value}{mark}")
    lines += [f"    {state.value} --> [*]" for state in states if state in final]
    lines += ["```", ""]
    for event in LISTED:
        after_each = {table[key] for key in table if key[1] is event}
        where = "stays" if event is Event.RENEW else f"→ {after_each.pop().value}"
        earlier = ", ".join(before.value for before, each in table if each is event)
        mark = "*" if event in local else ""
        lines.append(f"- {event.value}{mark} {where}, in: {earlier}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
