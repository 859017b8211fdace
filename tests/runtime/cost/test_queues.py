"""What is queued on each replica."""

from __future__ import annotations

import pytest

from pdctl.runtime.cost.queues import OVERDUE, Queues


def test_an_idle_replica_makes_nobody_wait() -> None:
    assert Queues().wait_s("d0", 1.0) == 0.0


def test_a_prompt_waits_for_what_is_left_of_those_before_it() -> None:
    queues = Queues()
    queues.enter("d0", 100, 2.0, 10.0)
    queues.enter("d0", 50, 1.0, 10.5)
    assert queues.wait_s("d0", 11.0) == pytest.approx(1.0 + 1.0)
    assert queues.prompt_tokens("d0") == 150


def test_the_next_prompts_turn_begins_when_the_one_before_has_its_first_token() -> None:
    queues = Queues()
    first = queues.enter("d0", 100, 2.0, 0.0)
    queues.enter("d0", 100, 2.0, 0.0)
    queues.first_token(first, 3.0)
    assert queues.wait_s("d0", 4.0) == pytest.approx(1.0)
    queues.leave(first, 5.0)
    assert queues.wait_s("d0", 4.0) == pytest.approx(1.0)


def test_an_overdue_prompt_has_still_something_to_go() -> None:
    queues = Queues()
    queues.enter("d0", 100, 2.0, 0.0)
    assert queues.wait_s("d0", 100.0) == pytest.approx(OVERDUE * 2.0)


def test_prompts_whose_first_token_does_not_show_are_over_when_their_time_has_passed() -> None:
    """Else a long answer that is not streamed would look like a long prompt."""
    queues = Queues()
    for _ in range(3):
        queues.enter("d0", 100, 1.0, 0.0, tells=False)
    assert queues.wait_s("d0", 0.5) == pytest.approx(2.5)
    assert queues.wait_s("d0", 60.0) == pytest.approx(OVERDUE)


def test_a_pairs_prompt_is_computed_by_its_prefill_replica() -> None:
    queues = Queues()
    queues.enter("p0>d0", 100, 2.0, 0.0)
    assert queues.wait_s("p0", 0.0) == pytest.approx(2.0)
    assert queues.wait_s("d0", 0.0) == 0.0


def test_a_pairs_two_queues_pass_at_once() -> None:
    """Its decode replica must be free by the time that the pages are there, and no sooner."""
    queues = Queues()
    queues.enter("d0", 100, 3.0, 0.0)
    assert queues.waits("p0>d0", 0.0).total_s(1.0) == pytest.approx(3.0)
    assert queues.waits("p0>d0", 0.0).total_s(5.0) == pytest.approx(5.0)
    assert queues.waits("d0", 0.0).total_s(1.0) == pytest.approx(4.0)


def test_a_request_is_quiet_where_nothing_shared_its_replicas_before_its_first_token() -> None:
    queues = Queues()
    first = queues.enter("p0>d0", 100, 1.0, 0.0)
    elsewhere = queues.enter("o0", 100, 1.0, 0.0)
    assert first.quiet
    assert elsewhere.quiet
    queues.first_token(first, 1.0)
    second = queues.enter("d0", 100, 1.0, 1.5)
    assert (first.quiet, first.lone) == (True, False)
    assert (second.quiet, second.lone) == (False, False)
    queues.enter("p1>d0", 100, 1.0, 1.6)
    assert not second.quiet
