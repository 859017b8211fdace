"""Both halves in one process, as on a single GPU: what the scheduler's half asks is answered with
no step between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines.vllm.requests import ended, request, schedule
from engines.vllm.sides import BLOCK, Side
from handoff.store.stores import CONTRACT, clients, host

from pdctl.engines.vllm import line
from pdctl.engines.vllm.scheduling import SchedulerHalf
from pdctl.engines.vllm.steps import Begin, News, Notice, Place, Seek
from pdctl.topology.model import Role

WAIT_S = 30.0
BLOCKS = [3, 1, 4, 2, 9, 5, 6]


class Straight:
    """A worker's half that answers when a test says so."""

    def __init__(self) -> None:
        self.asked: list[Begin | Seek] = []
        self.answers: list[Notice] = []
        self.begin = self.seek = self.asked.append

    def news(self) -> list[Notice]:
        found, self.answers = self.answers, []
        return found


def half(role: Role, straight: Any) -> SchedulerHalf:
    return SchedulerHalf(role, BLOCK, recomputes=False, shares=True, line=lambda: straight)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Side]:
    with host(tmp_path / "s.sock") as store, clients(store.path, 1) as (client,):
        client.give(list(range(200)))
        assigned = SimpleNamespace(contract=CONTRACT)
        side = Side("o", 1, store=client.store, assigned=assigned)
        side.session.board = client.board
        yield side
        side.half.close()


def test_what_the_store_has_is_known_without_a_step(worker: Side) -> None:
    """And with its blocks the pages are loaded; the orders of the steps are as without a line."""
    side, ask = half(Role.BOTH, worker.half), request(200, params=None)
    side.arrived(ask)
    found, deadline = side.matched(ask, 0), time.monotonic() + WAIT_S
    while found[0] is None:
        assert time.monotonic() < deadline
        found = side.matched(ask, 0)
    assert found == (199, True)
    side.placed(ask, BLOCKS, 199)
    step = side.step(schedule())
    assert step.seek == []
    assert step.place == [Place(request_id="r", blocks=BLOCKS, held_tokens=0, private=BLOCKS)]
    worker.step(place=step.place)
    worker.until(lambda: "r" in worker.loaded)
    assert (worker.lost, worker.notices) == (set(), [])


def test_a_handoff_begins_as_its_request_comes() -> None:
    """Prefill: its pages, then the store; each answer is heard at the next look."""
    straight, ask = Straight(), request(200)
    side = half(Role.PREFILL, straight)
    side.arrived(ask)
    assert [type(each) for each in straight.asked] == [Begin]
    assert side.matched(ask, 0) == (None, False)
    straight.answers = [Notice(request_id="r", news=News.RESERVED)]
    assert side.matched(ask, 0) == (None, False)
    assert [type(each) for each in straight.asked] == [Begin, Seek]
    straight.answers = [Notice(request_id="r", news=News.FOUND, tokens=128)]
    assert side.matched(ask, 64) == (64, True)
    step = side.step(schedule())
    assert (step.begin, step.seek) == ([], [])


def test_what_comes_late_by_a_step_opens_nothing_that_has_failed() -> None:
    """R11: an output that was made before the failure may be read after it."""
    straight, ask = Straight(), request(200)
    side = half(Role.DECODE, straight)
    side.arrived(ask)
    straight.answers = [Notice(request_id="r", news=News.FAILED)]
    assert side.matched(ask, 0) == (1, True)
    side.told([Notice(request_id="r", news=News.OFFERED)])
    assert side.matched(ask, 0) == (1, True)


def test_a_request_that_ends_before_a_step_is_finished_in_the_next(worker: Side) -> None:
    """What it was lent goes back."""
    side, ask = half(Role.BOTH, worker.half), request(200, params=None)
    side.arrived(ask)
    side.matched(ask, 0)
    side.finished(ended(ask, "FINISHED_ABORTED"))
    worker.step(finish=side.step(schedule()).finish)
    assert worker.half._sharers == {}


def test_a_process_with_no_worker_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU vLLM's worker is a process of its own."""
    monkeypatch.setattr(line, "_worker", None)
    assert line.line() is None
    straight = Straight()
    line.join(straight)
    assert line.line() is straight
