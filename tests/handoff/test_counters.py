"""The board on which a replica counts."""

from __future__ import annotations

import pytest

from pdctl.handoff import counters
from pdctl.handoff.counters import CounterBoard


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
