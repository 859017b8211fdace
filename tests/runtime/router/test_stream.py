"""Events keep their bytes however they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.runtime.router import stream
from pdctl.runtime.router.stream import EventTooLong, Kind, Splitter, kind_of

EVENTS = [
    b": keepalive 1/2\n\n",
    b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n',
    b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\r\n\r\n',
    b"event: x\ndata: 1\ndata: 2\n\n",
    b"data: [DONE]\n\n",
]


@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.data())
def test_any_cut_gives_the_same_events(events: list[bytes], draw: st.DataObject) -> None:
    whole = b"".join(events)
    splitter = Splitter()
    found = []
    at = 0
    while at < len(whole):
        size = draw.draw(st.integers(1, 20))
        found += splitter.feed(whole[at : at + size])
        at += size
    assert [event.raw for event in found] == events
    assert not splitter.partial


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (EVENTS[0], Kind.COMMENT),
        (EVENTS[1], Kind.CONTENT),
        (EVENTS[2], Kind.EMPTY),
        (EVENTS[3], Kind.CONTENT),
        (EVENTS[4], Kind.DONE),
        (b"data:[DONE]\n\n", Kind.DONE),
        (b'data: {"error": {"message": "x"}}\n\n', Kind.ERROR),
        (b'data: {"choices": [], "usage": {}}\n\n', Kind.EMPTY),
        (b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n', Kind.CONTENT),
        (b'data: {"choices": [{"text": ""}]}\n\n', Kind.EMPTY),
        (b'data: {"choices": [{"delta": {"tool_calls": [{}]}}]}\n\n', Kind.CONTENT),
        (b"data: {broken\n\n", Kind.CONTENT),
        (b"data: " + b"[" * 9999 + b"\n\n", Kind.CONTENT),
    ],
)
def test_events_are_told_apart(raw: bytes, kind: Kind) -> None:
    """U36: a chunk without output is not content; what is not understood is."""
    assert kind_of(raw) is kind


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_EVENT_BYTES", 100)
    splitter = Splitter()
    with pytest.raises(EventTooLong):
        splitter.feed(b"data: " + b"x" * 200)
