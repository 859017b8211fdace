"""Life and deadlines, on a clock of the test's own."""

from __future__ import annotations

import math

import pytest

from pdctl.errors import HandoffExpired
from pdctl.handoff.lease import Deadline, Life, Verdict, checked_timeout, judge


@pytest.mark.parametrize("bad", [0, 0.0, -1, -0.5, math.nan, math.inf, -math.inf])
def test_impossible_timeouts_are_refused(bad):
    """R8: 0, negative, nan and inf are refused."""
    with pytest.raises(HandoffExpired, match="positive"):
        checked_timeout(bad)


def test_the_deadline_is_the_requests_own():
    """R3: it is the number that came with the request; none of its own limits it."""
    for timeout_s in (0.5, 600.0, 86_400.0):
        deadline = Deadline(timeout_s, now=100.0)
        assert not deadline.passed(100.0 + timeout_s - 0.001)
        assert deadline.passed(100.0 + timeout_s)


def test_progress_renews_the_deadline():
    """R5: slow but progressing goes on for as long as it progresses."""
    deadline, now = Deadline(10.0, 0.0), 0.0
    for _ in range(100):
        now += 9.9
        assert not deadline.passed(now)
        deadline.progressed(now)
    assert deadline.passed(now + 10.0)


def test_old_progress_does_not_shorten_the_deadline():
    """Progress that is reported late changes nothing."""
    deadline = Deadline(10.0, 50.0)
    deadline.progressed(20.0)
    assert deadline.at == 60.0


def test_silence_for_five_seconds_is_death():
    """R7: renewed every 2 s, dead after 5 s of silence."""
    life = Life(0.0)
    assert life.verdict(1.9) is Verdict.FINE
    assert life.verdict(2.0) is Verdict.RENEW
    life.spoke_at = 4.5
    assert life.verdict(4.9) is Verdict.FINE
    assert life.verdict(5.0) is Verdict.DEAD


def test_any_byte_is_a_sign_of_life():
    """R5: no Renew is needed between the bytes of a slow piece."""
    life = Life(0.0)
    for now in range(0, 100, 4):
        life.heard_at = life.spoke_at = float(now)
        assert life.verdict(now + 1.9) is Verdict.FINE


def test_a_connection_that_was_idle_is_not_dead_at_once():
    """U21: a handoff on a connection that was idle for hours starts a new lease."""
    life = Life(0.0)
    life.start(7200.0)
    assert life.verdict(7201.0) is Verdict.FINE


def test_being_alive_is_not_progress():
    """R6: a peer that only renews still runs into the deadline, which goes before all else."""
    life, deadline = Life(0.0), Deadline(30.0, 0.0)
    life.heard_at = life.spoke_at = 30.0
    assert judge(life, deadline, 30.0) is Verdict.EXPIRED
    life.heard_at = life.spoke_at = 0.0
    assert judge(life, deadline, 30.0) is Verdict.EXPIRED


def test_without_a_peer_only_the_deadline_counts():
    """R2: a room that no receiver ever claims expires all the same."""
    deadline = Deadline(30.0, 0.0)
    assert judge(None, deadline, 29.0) is Verdict.FINE
    assert judge(None, deadline, 30.0) is Verdict.EXPIRED
