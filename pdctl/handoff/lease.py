"""When a peer is dead and when a request's time is over. No clock of its own.

Two questions, kept apart. *Life*: any byte from the peer is a sign of it; 5 s without one and
the peer is gone. *The deadline*: `timeout_s` after the last progress, and only positions
computed, sent or received are progress: a peer that is alive but stuck expires.
"""

from __future__ import annotations

import enum
import math

from pdctl.errors import HandoffExpired

RENEW_S = 2.0
"""An end says Renew when it has sent nothing for that long."""
DEAD_S = 5.0
"""Silence after which the peer counts as gone."""


class Verdict(enum.Enum):
    FINE = "fine"
    RENEW = "renew"
    DEAD = "dead"
    EXPIRED = "expired"


def checked_timeout(timeout_s: float) -> float:
    """`timeout_s` itself.

    Raises:
        HandoffExpired: 0, negative, infinite or not a number.
    """
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise HandoffExpired(
            f"timeout_s must be a positive number of seconds, not {timeout_s}",
            hint="the request's deadline may have passed before it arrived",
        )
    return timeout_s


class Deadline:
    """One request's time; every argument and result in seconds of one monotonic clock."""

    def __init__(self, timeout_s: float, now: float) -> None:
        self.timeout_s = checked_timeout(timeout_s)
        self._progress_at = now

    @property
    def at(self) -> float:
        return self._progress_at + self.timeout_s

    def progressed(self, now: float) -> None:
        """Positions were computed, sent or received at `now`; earlier times change nothing."""
        self._progress_at = max(self._progress_at, now)

    def idle_s(self, now: float) -> float:
        """Since the last progress."""
        return max(0.0, now - self._progress_at)

    def passed(self, now: float) -> bool:
        return now >= self.at


class Life:
    """Signs of life between two ends. Plain stores only: any thread may call any method."""

    def __init__(self, now: float) -> None:
        self.heard_at = now
        self.spoke_at = now

    def start(self, now: float) -> None:
        """A handoff begins on a connection that may have been idle for long."""
        self.heard_at = self.spoke_at = now

    def verdict(self, now: float) -> Verdict:
        if now - self.heard_at >= DEAD_S:
            return Verdict.DEAD
        if now - self.spoke_at >= RENEW_S:
            return Verdict.RENEW
        return Verdict.FINE


def judge(life: Life | None, deadline: Deadline, now: float) -> Verdict:
    """What an end has to do now; the deadline goes before everything, a dead peer before
    renewing. `life` is None while there is no peer."""
    if deadline.passed(now):
        return Verdict.EXPIRED
    return Verdict.FINE if life is None else life.verdict(now)
