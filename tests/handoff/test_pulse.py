"""When an end's handoffs are looked at."""

from __future__ import annotations

import threading

import pytest
from handoff.ends import WAIT_S

from pdctl.handoff import pulse as pulse_module
from pdctl.handoff.pulse import Pulse


@pytest.fixture(autouse=True)
def _rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wake-up there is no beat."""
    monkeypatch.setattr(pulse_module, "IDLE_S", 1e4)


def test_a_handoff_that_begins_while_nothing_is_under_way_is_looked_at() -> None:
    """However often: each time the pulse had gone to rest."""
    check_each_wake_is_looked_at(under_way=False)


def test_one_that_begins_during_a_look_is_looked_at_by_the_next() -> None:
    """The look that has not seen it says that nothing is under way."""
    looks: list[bool] = []
    seen = threading.Event()

    def beat() -> bool:
        looks.append(True)
        if len(looks) == 1:
            pulse.wake()
        else:
            seen.set()
        return False

    pulse = Pulse("beats", beat)
    pulse.start()
    pulse.wake()
    assert seen.wait(WAIT_S)
    pulse.stop(WAIT_S)
    assert len(looks) == 2


def test_one_that_begins_while_others_are_under_way_is_looked_at_with_them() -> None:
    """It wakes nobody: those are looked at a few times a second anyway."""
    check_each_wake_is_looked_at(under_way=True)


def check_each_wake_is_looked_at(*, under_way: bool) -> None:
    beats = threading.Semaphore(0)

    def beat() -> bool:
        beats.release()
        return under_way

    pulse = Pulse("beats", beat)
    pulse.start()
    for _ in range(3):
        pulse.wake()
        assert beats.acquire(timeout=WAIT_S)
    pulse.stop(WAIT_S)
