"""An engine's process that does nothing, while its data plane runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from handoff.ends import WAIT_S

from pdctl.errors import HandoffError, PeerLost
from pdctl.handoff.apart import life
from pdctl.handoff.apart.calls import Call, Ping
from pdctl.handoff.apart.life import EngineLife


class End:
    """Has handoffs open for as long as a test says."""

    busy = True

    def __init__(self) -> None:
        self.error: HandoffError | None = None
        self.lost = threading.Event()

    def lose(self, error: HandoffError) -> None:
        self.error = error
        self.busy = False
        self.lost.set()


@contextmanager
def watched(end: End, tell: Callable[[Call], None]) -> Iterator[EngineLife]:
    made = EngineLife("p0", end, tell)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "ASK_S", 0.005)
    monkeypatch.setattr(life, "DEAD_S", 0.05)


def test_a_silent_engine_loses_its_handoffs() -> None:
    """R4, R11: frozen, say: after the silence that ends a frozen peer's, so that the other
    replica need not wait for the request's deadline."""
    asked: list[Call] = []
    end = End()
    with watched(end, asked.append):
        assert end.lost.wait(WAIT_S)
    assert isinstance(end.error, PeerLost)
    assert "p0" in end.error.message
    assert isinstance(asked[0], Ping)


def test_an_engine_that_answers_keeps_them() -> None:
    """However long they take."""
    end, often, named = End(), threading.Semaphore(0), threading.Event()

    def answer(call: Call) -> None:
        assert named.wait(WAIT_S)
        made.heard()
        often.release()

    with watched(end, answer) as made:
        named.set()
        for _ in range(30):
            assert often.acquire(timeout=WAIT_S)
    assert not end.lost.is_set()


def test_an_engine_without_handoffs_is_not_asked() -> None:
    """It may be compiling a kernel for a minute."""
    end, asked = End(), threading.Event()
    end.busy = False
    with watched(end, lambda call: asked.set()):
        assert not asked.wait(0.1)
