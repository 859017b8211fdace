"""The connector's scheduler half against stand-ins for vLLM's requests and schedules."""

from __future__ import annotations

import pytest
from engines.vllm.requests import BLOCK, LEG, ended, request, schedule

from pdctl.engines.vllm import scheduling
from pdctl.engines.vllm.scheduling import SchedulerHalf
from pdctl.engines.vllm.steps import Doom, Export, Finish, News, Notice, Place
from pdctl.topology.model import Role


def half(role: Role, *, recomputes: bool = False) -> SchedulerHalf:
    return SchedulerHalf(role, BLOCK, recomputes=recomputes)


def tell(side: SchedulerHalf, news: News, name: str = "r") -> None:
    side.told([Notice(request_id=name, news=news)])


def test_a_request_without_a_leg_is_none_of_ours() -> None:
    """An ordinary request is neither held back nor reported."""
    side = half(Role.DECODE)
    side.arrived(request(100, params=None))
    assert side.matched(request(100, params=None), 0) == (0, False)
    step = side.step(schedule())
    assert (step.begin, step.place) == ([], [])
    assert step.load.requests_active == 1


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_nothing_is_allocated_before_the_handoff_allows_it(role: Role) -> None:
    """R1, U2: the match is not known yet, however often it is asked."""
    side, ask = half(role), request(100)
    side.arrived(ask)
    assert [side.matched(ask, 0) for _ in range(3)] == [(None, False)] * 3
    (begin,) = side.step(schedule()).begin
    assert (begin.leg, begin.token_ids) == (LEG, list(range(100)))
    assert side.step(schedule()).begin == []


@pytest.mark.parametrize(
    ("tokens", "local", "external"),
    [(65, 0, 64), (66, 0, 65), (129, 64, 64), (129, 128, 0), (64, 0, 63), (1, 0, 0)],
)
def test_decode_asks_for_all_but_the_last_position_beyond_its_cache(
    tokens: int, local: int, external: int
) -> None:
    """R25: n - 1 positions, less what its prefix cache holds."""
    side, ask = half(Role.DECODE), request(tokens)
    side.arrived(ask)
    tell(side, News.OFFERED)
    assert side.matched(ask, local) == (external, external > 0)


def test_shared_blocks_are_never_given_to_be_filled() -> None:
    """Those of the prefix cache belong to others too: a failure must not mark them."""
    side, ask = half(Role.DECODE), request(200)
    side.arrived(ask)
    tell(side, News.OFFERED)
    assert side.matched(ask, 128) == (71, True)
    side.placed(ask, [4, 5, 6, 7], 71)
    assert side.step(schedule()).place == [
        Place(request_id="r", blocks=[4, 5, 6, 7], held_tokens=128, private=[6, 7])
    ]
    assert side.matched(ask, 0) == (0, False), "preempted: it computes for itself"


def test_a_prompt_held_whole_has_nothing_to_be_filled() -> None:
    """The worker must not report the end of a load that vLLM never began."""
    side, ask = half(Role.DECODE), request(129)
    side.arrived(ask)
    tell(side, News.OFFERED)
    assert side.matched(ask, 128) == (0, False)
    side.placed(ask, [1, 2, 3], 0)
    assert side.step(schedule()).place[0] == Place(
        request_id="r", blocks=[1, 2, 3], held_tokens=128, private=[]
    )


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_handoff_that_failed_early_fails_its_request_alone(role: Role) -> None:
    """R34, U18: one private block is asked for, and reported as not filled."""
    side, ask = half(role), request(200)
    side.arrived(ask)
    tell(side, News.FAILED)
    assert side.matched(ask, 128) == (1, True)
    side.placed(ask, [4, 5, 6], 1)
    assert side.step(schedule()).doom == [Doom(request_id="r", blocks=[6])]


def test_a_decode_replica_that_recomputes_does_so_only_for_a_leg_that_it_could_read() -> None:
    """R72: on_failure = "recompute"; garbage is still an error."""
    side, ask = half(Role.DECODE, recomputes=True), request(100)
    side.arrived(ask)
    tell(side, News.FAILED)
    assert side.matched(ask, 0) == (0, False)
    garbled = request(100, "g", params={"pdctl": {"room": "x"}})
    side.arrived(garbled)
    assert side.matched(garbled, 0) == (1, True)


def test_a_failure_after_the_blocks_were_given_changes_nothing_here() -> None:
    """The worker reports those blocks itself."""
    side, ask = half(Role.DECODE), request(100)
    side.arrived(ask)
    tell(side, News.OFFERED)
    side.matched(ask, 0)
    side.placed(ask, [1, 2], 99)
    tell(side, News.FAILED)
    assert side.matched(ask, 0) == (0, False)
    assert side.step(schedule()).doom == []


def test_prefill_exports_chunk_by_chunk_and_anew_after_a_preemption() -> None:
    """U8: blocks add up; a resumed request brings all of its new ones."""
    side, ask = half(Role.PREFILL), request(300)
    side.arrived(ask)
    tell(side, News.RESERVED)
    assert side.matched(ask, 0) == (0, False)
    side.placed(ask, [1, 2], 0)
    first = side.step(schedule(new={"r": ([1, 2], 0)}, scheduled={"r": 128})).export
    second = side.step(schedule(cached={"r": ([3, 4], 128)}, scheduled={"r": 128})).export
    again = side.step(
        schedule(cached={"r": ([7, 8], 0)}, scheduled={"r": 128}, resumed=("r",))
    ).export
    last = side.step(schedule(cached={"r": ([], 128)}, scheduled={"r": 300})).export
    assert first == [Export(request_id="r", blocks=[1, 2], positions=128)]
    assert second == [Export(request_id="r", blocks=[1, 2, 3, 4], positions=256)]
    assert again == [Export(request_id="r", blocks=[7, 8], positions=128)]
    assert last[0].positions == 300, "never beyond the prompt"


def test_the_end_of_a_request_is_told_once_with_its_token() -> None:
    """R15, U4: `request_finished` may come twice; what was aborted has no token."""
    side = half(Role.PREFILL)
    for name in ("a", "b"):
        side.arrived(request(100, name))
    side.step(schedule())
    whole = ended(request(100, "a"), "FINISHED_LENGTH_CAPPED", 42)
    side.finished(whole)
    side.finished(whole)
    side.finished(ended(request(100, "b"), "FINISHED_ABORTED", 43))
    step = side.step(schedule())
    assert step.finish == [
        Finish(request_id="a", first_token=42),
        Finish(request_id="b", first_token=None),
    ]
    assert (step.load.requests_active, step.load.output_tokens) == (0, 2)


def test_a_request_that_ends_before_its_leg_began_never_begins() -> None:
    """U4: aborted between two steps; late news of it change nothing."""
    side, ask = half(Role.DECODE), request(100)
    side.arrived(ask)
    side.finished(ended(ask, "FINISHED_ABORTED"))
    assert side.step(schedule()).begin == []
    tell(side, News.OFFERED)
    assert side.step(schedule()).place == []


def test_the_first_forward_on_imported_positions_is_named_once() -> None:
    """It ends the import phase."""
    side, ask = half(Role.DECODE), request(100)
    side.arrived(ask)
    tell(side, News.OFFERED)
    side.matched(ask, 0)
    side.placed(ask, [1, 2], 99)
    assert side.step(schedule()).starts == []
    running = schedule(cached={"r": ([], 99)}, scheduled={"r": 1})
    assert side.step(running).starts == ["r"]
    assert side.step(running).starts == []


def test_an_error_about_one_request_fails_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """R34: vLLM's scheduler hears of a load that failed, never of the error."""
    side = half(Role.DECODE)
    broken, good = request(100, "broken"), request(100, "good")
    monkeypatch.setattr(scheduling, "leg_of", lambda params: 1 / 0)
    side.arrived(broken)
    monkeypatch.undo()
    side.arrived(good)
    assert side.matched(broken, 0) == (1, True)
    assert side.matched(good, 0) == (None, False)
    side.placed(broken, [3], 1)
    step = side.step(schedule())
    assert [begin.request_id for begin in step.begin] == ["good"]
    assert step.doom == [Doom(request_id="broken", blocks=[3])]


def test_blocks_that_can_not_be_placed_fail_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """R34: the block of the last token, which no other request shares, is reported."""
    side, ask = half(Role.DECODE), request(200)
    side.arrived(ask)
    tell(side, News.OFFERED)
    assert side.matched(ask, 128) == (71, True)
    monkeypatch.setattr(scheduling, "Place", lambda **_: 1 / 0)
    side.placed(ask, [4, 5, 6, 7], 71)
    step = side.step(schedule())
    assert (step.place, step.doom) == ([], [Doom(request_id="r", blocks=[7])])


def test_a_decode_tells_of_each_step_that_it_computes_in() -> None:
    """R5: whoever waits for an answer that is not streamed hears that its room moves on."""
    side, ask = half(Role.DECODE), request(100)
    side.arrived(ask)
    assert side.step(schedule()).load.decoding == []
    tell(side, News.OFFERED)
    side.placed(ask, [1, 2], 99)
    for _ in range(2):
        assert side.step(schedule(scheduled={"r": 1})).load.decoding == [LEG.room]
    side.finished(ended(ask, "FINISHED_STOPPED", 5, 6))
    load = side.step(schedule()).load
    assert (load.decoding, load.decoded) == ([], [LEG.room])
    assert side.step(schedule()).load.decoded == []


def test_a_prefill_tells_of_no_decode() -> None:
    side, ask = half(Role.PREFILL), request(100)
    side.arrived(ask)
    tell(side, News.RESERVED)
    assert side.step(schedule(new={"r": ([1, 2], 0)}, scheduled={"r": 100})).load.decoding == []
    side.finished(ended(ask, "FINISHED_LENGTH_CAPPED", 5))
    assert side.step(schedule()).load.decoded == []


def test_an_order_in_a_leg_s_place_releases_a_room() -> None:
    """U2: the request that brings it is an ordinary one."""
    side, order = half(Role.PREFILL), request(1, params={"pdctl": {"release": 7}})
    side.arrived(order)
    assert side.matched(order, 0) == (0, False)
    assert side.step(schedule()).release == [7]
    assert side.step(schedule()).release == []
