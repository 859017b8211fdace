"""The board on which a replica counts."""

from __future__ import annotations

import pytest

from pdctl.handoff import counters
from pdctl.handoff.counters import COUNTED, CounterBoard, shown_pair


def test_a_request_that_decodes_tells_of_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds since then, per room; nothing before the first token and after the last."""
    now_s = 100.0
    monkeypatch.setattr(counters, "monotonic_s", lambda: now_s)
    board = CounterBoard()
    board.decode_over(7)
    assert board.read().decoding == {}
    board.decoded(7)
    now_s = 102.5
    board.decoded(8)
    now_s = 103.0
    assert board.read().decoding == {7: 3.0, 8: 0.5}
    board.decoded(7)
    assert board.read().decoding == {7: 0.0, 8: 0.5}
    board.decode_over(8)
    board.decode_over(7)
    assert board.read().decoding == {}


def test_phases_and_round_trips_are_counted_by_pair() -> None:
    """A phase is of the replica and of the pair; of round trips the shortest stays. A pair's row
    has what either end saw."""
    prefill, decode = CounterBoard(), CounterBoard()
    prefill.observe("transfer", 0.2, "d0")
    prefill.observe("transfer", 0.4, "d1")
    decode.observe("import", 0.003, "p0")
    for seconds in (0.004, 0.001, 0.002):
        decode.met("p0", seconds)
    assert prefill.read().phases["transfer"].count == 2
    row = shown_pair(("p0", prefill.read()), ("d0", decode.read()))
    assert {name: phase["sum_s"] for name, phase in row["phases"].items()} == {
        "transfer": 0.2,
        "import": 0.003,
    }
    assert row["round_trip_s"] == 0.001
    assert {row[name] for name in COUNTED} == {0}
    strangers = shown_pair(("p0", prefill.read()), None)
    assert (strangers["phases"], strangers["round_trip_s"]) == ({}, None)
    with pytest.raises(KeyError):
        prefill.observe("waiting", 0.1, "d0")
