from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pdctl.runtime.bench.events import Events

STREAM = 'data: {"a": "é"}\r\n\r\n: ping\n\ndata: x\ndata:y\n\nid: 3\n\ndata: [DONE]\n\n'.encode()


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=12).map(sorted))
def test_events_are_the_same_wherever_the_stream_is_cut(cuts: list[int]) -> None:
    events = Events()
    edges = [0, *cuts, len(STREAM)]
    found = [payload for a, b in itertools.pairwise(edges) for payload in events.feed(STREAM[a:b])]
    assert found == ['{"a": "é"}', "x\ny", "[DONE]"]


def test_an_event_without_its_blank_line_is_not_complete() -> None:
    assert Events().feed(b"data: x\n") == []
