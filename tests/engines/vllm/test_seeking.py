"""The scheduler half of ordinary replicas: which prompts are looked for, and what then."""

from __future__ import annotations

from typing import Any

import pytest
from engines.vllm.requests import BLOCK, ended, request, schedule

from pdctl.engines.vllm.scheduling import SchedulerHalf
from pdctl.engines.vllm.steps import Export, Finish, News, Notice, Place
from pdctl.topology.model import Role


def shared(tokens: int, name: str = "r", **fields: Any) -> Any:
    """A request of an ordinary replica."""
    made = request(tokens, name, params=None)
    vars(made).update(fields)
    return made


def sharer() -> SchedulerHalf:
    return SchedulerHalf(Role.BOTH, BLOCK, recomputes=True, shares=True)


def found(side: SchedulerHalf, tokens: int) -> None:
    side.told([Notice(request_id="r", news=News.FOUND, tokens=tokens)])


def test_a_shared_prompt_waits_until_the_store_has_answered() -> None:
    """R11: nothing blocks; the match is "not known yet", and the salt goes with the question."""
    side, ask = sharer(), shared(200, cache_salt="tenant")
    side.arrived(ask)
    assert [side.matched(ask, 0) for _ in range(3)] == [(None, False)] * 3
    (seek,) = side.step(schedule()).seek
    assert (seek.token_ids, seek.salt) == (list(range(200)), "tenant")
    assert side.step(schedule()).seek == []
    found(side, 192)
    assert side.matched(ask, 64) == (128, True)


@pytest.mark.parametrize(
    ("stored", "local", "external"), [(200, 0, 199), (199, 0, 199), (64, 64, 0), (0, 0, 0)]
)
def test_the_last_token_is_computed_whatever_is_stored(
    stored: int, local: int, external: int
) -> None:
    """U16: a full hit leaves one position to compute; a miss leaves all."""
    side, ask = sharer(), shared(200)
    side.arrived(ask)
    side.matched(ask, local)
    found(side, stored)
    assert side.matched(ask, local) == (external, external > 0)


@pytest.mark.parametrize(
    ("tokens", "local", "fields"),
    [(64, 0, {}), (200, 136, {}), (200, 0, {"skip_reading_prefix_cache": True})],
)
def test_what_a_page_would_not_spare_is_not_looked_for(
    tokens: int, local: int, fields: dict[str, Any]
) -> None:
    """Short prompts, what the own cache has, and prompts of which every position is wanted."""
    side, ask = sharer(), shared(tokens, **fields)
    side.arrived(ask)
    assert side.matched(ask, local) == (0, False)
    step = side.step(schedule(new={"r": ([1, 2, 3, 4], local)}, scheduled={"r": tokens - local}))
    assert (step.seek, step.export) == ([], [])


def test_a_shared_prompt_is_copied_out_while_it_is_computed() -> None:
    """From the position where it begins; no more once it is decoded."""
    side, ask = sharer(), shared(200)
    side.arrived(ask)
    side.matched(ask, 0)
    found(side, 64)
    side.matched(ask, 0)
    side.placed(ask, [1, 2, 3, 4], 64)
    assert side.step(schedule()).place == [
        Place(request_id="r", blocks=[1, 2, 3, 4], held_tokens=0, private=[1, 2, 3, 4])
    ]
    first = side.step(schedule(new={"r": ([1, 2, 3, 4], 64)}, scheduled={"r": 100}))
    assert first.export == [Export(request_id="r", blocks=[1, 2, 3, 4], positions=164)]
    last = side.step(schedule(cached={"r": ([], 164)}, scheduled={"r": 36}))
    assert last.export == [Export(request_id="r", blocks=[1, 2, 3, 4], positions=200)]
    assert side.step(schedule(cached={"r": ([], 200)}, scheduled={"r": 1})).export == []


def test_a_prompt_that_nothing_is_found_of_gives_its_loan_back() -> None:
    """Its place says that no block is to be filled."""
    side, ask = sharer(), shared(200)
    side.arrived(ask)
    side.matched(ask, 0)
    found(side, 0)
    assert side.matched(ask, 0) == (0, False)
    side.placed(ask, [1, 2, 3, 4], 0)
    (place,) = side.step(schedule()).place
    assert place.private == []


def test_a_shared_prompt_that_ends_early_is_not_looked_for() -> None:
    """Nobody would give its loan back."""
    side, ask = sharer(), shared(200)
    side.arrived(ask)
    side.matched(ask, 0)
    side.finished(ended(ask, "FINISHED_ABORTED"))
    step = side.step(schedule())
    assert (step.seek, step.finish) == ([], [Finish(request_id="r", first_token=None)])


def test_a_prefill_prompt_is_looked_for_once_its_pages_are_reserved() -> None:
    """No page is on loan to a request that waits for the buffer; then it loads what is there and
    exports all of it."""
    side, ask = SchedulerHalf(Role.PREFILL, BLOCK, recomputes=False, shares=True), request(200)
    side.arrived(ask)
    assert side.matched(ask, 0) == (None, False)
    assert side.step(schedule()).seek == []
    side.told([Notice(request_id="r", news=News.RESERVED)])
    assert side.matched(ask, 0) == (None, False)
    (seek,) = side.step(schedule()).seek
    assert seek.token_ids == list(range(200))
    found(side, 192)
    assert side.matched(ask, 64) == (128, True)
    side.placed(ask, [1, 2, 3, 4], 128)
    assert side.step(schedule()).place == [
        Place(request_id="r", blocks=[1, 2, 3, 4], held_tokens=64, private=[2, 3, 4])
    ]
    step = side.step(schedule(new={"r": ([1, 2, 3, 4], 192)}, scheduled={"r": 8}))
    assert step.export == [Export(request_id="r", blocks=[1, 2, 3, 4], positions=200)]


def test_a_handoff_that_keeps_nothing_goes_past_the_store() -> None:
    """As canaries and benches ask: computed whole, sent whole."""
    side = SchedulerHalf(Role.PREFILL, BLOCK, recomputes=False, shares=True)
    ask = request(200, params={**request(1).kv_transfer_params, "pdctl_cache": False})
    side.arrived(ask)
    (begin,) = side.step(schedule()).begin
    assert begin.salt is None
    side.told([Notice(request_id="r", news=News.RESERVED)])
    assert side.matched(ask, 0) == (0, False)
    assert side.step(schedule()).seek == []


def test_a_prefill_whose_handoff_fails_while_it_is_looked_for_computes_nothing() -> None:
    """As one that waits for the buffer: one block, reported as not loaded."""
    side, ask = SchedulerHalf(Role.PREFILL, BLOCK, recomputes=False, shares=True), request(200)
    side.arrived(ask)
    side.told([Notice(request_id="r", news=News.RESERVED)])
    side.matched(ask, 0)
    side.told([Notice(request_id="r", news=News.FAILED)])
    found_late = Notice(request_id="r", news=News.FOUND, tokens=192)
    assert side.matched(ask, 0) == (1, True)
    side.told([found_late])
    assert side.matched(ask, 0) == (1, True)


def test_what_is_computed_on_a_prefill_replica_without_a_leg_is_its_own() -> None:
    """vLLM would fail it for a page that the store has no more."""
    side, ask = SchedulerHalf(Role.PREFILL, BLOCK, recomputes=False, shares=True), shared(200)
    side.arrived(ask)
    assert side.matched(ask, 0) == (0, False)


def test_an_ordinary_replica_that_shares_nothing_holds_nobody_up() -> None:
    """R57: as where there is no [sharing]."""
    side, ask = SchedulerHalf(Role.BOTH, BLOCK, recomputes=False), shared(200)
    side.arrived(ask)
    assert side.matched(ask, 0) == (0, False)
    step = side.step(schedule(new={"r": ([1], 0)}, scheduled={"r": 200}))
    assert (step.seek, step.export) == ([], [])
