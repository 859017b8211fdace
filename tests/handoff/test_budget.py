"""The byte budget against a model of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdctl.errors import BudgetExceeded, QueueFull
from pdctl.handoff.budget import Budget, Claim

TOTAL = 10


def ask(budget: Budget, size: int, log: list[int]) -> Claim:
    claim = budget.claim(size, lambda: log.append(size))
    budget.start(claim)
    return claim


class AgainstModel(RuleBasedStateMachine):
    """R41: grants are in order of asking, never over the total, and nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.gauges = (0, 0)
        self.budget = Budget(TOTAL, max_waiters=4, changed=self.changed)
        self.waiting: list[tuple[int, Claim]] = []
        self.held: list[tuple[int, Claim]] = []
        self.granted: list[int] = []
        self.number = 0

    def changed(self, used: int, waiters: int) -> None:
        self.gauges = (used, waiters)

    @rule(size=st.integers(0, TOTAL + 2))
    def claim(self, size: int) -> None:
        self.number += 1
        number = self.number
        claim = self.budget.claim(size, lambda: self.granted.append(number))
        if size > TOTAL:
            with pytest.raises(BudgetExceeded):
                self.budget.start(claim)
        elif len(self.waiting) >= 4:
            with pytest.raises(QueueFull):
                self.budget.start(claim)
        else:
            self.waiting.append((number, claim))
            expected = self.model_grants()
            before = len(self.granted)
            self.budget.start(claim)
            assert self.granted[before:] == expected

    @precondition(lambda self: self.held or self.waiting)
    @rule(choice=st.integers(0, 50), twice=st.booleans())
    def release(self, choice: int, twice: bool) -> None:
        everything = self.held + self.waiting
        each = everything[choice % len(everything)]
        (self.held if each in self.held else self.waiting).remove(each)
        expected = self.model_grants()
        before = len(self.granted)
        for _ in range(1 + twice):
            each[1].release()
        assert self.granted[before:] == expected

    def model_grants(self) -> list[int]:
        numbers = []
        while self.waiting:
            used = sum(claim.size for _, claim in self.held)
            if used + self.waiting[0][1].size > TOTAL:
                break
            self.held.append(self.waiting.pop(0))
            numbers.append(self.held[-1][0])
        return numbers

    @invariant()
    def gauges_are_true(self) -> None:
        used = sum(claim.size for _, claim in self.held)
        assert self.gauges == (used, len(self.waiting))
        assert (self.budget.used, self.budget.waiters) == self.gauges
        assert used <= TOTAL


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=60, deadline=None)


def test_more_than_everything_is_refused_at_once():
    """R40: a prompt that can never fit fails before anything waits for it."""
    budget, log = Budget(TOTAL), []
    with pytest.raises(BudgetExceeded, match="11"):
        ask(budget, TOTAL + 1, log)
    assert (budget.used, budget.waiters, log) == (0, 0, [])


def test_a_small_one_does_not_overtake_a_big_one():
    """R41: order is order of arrival, so that a long prompt is not starved."""
    budget, log = Budget(TOTAL), []
    first = ask(budget, 6, log)
    ask(budget, 7, log)
    ask(budget, 1, log)
    assert log == [6]
    first.release()
    assert log == [6, 7, 1]


def test_cancelling_the_head_lets_the_next_pass():
    """R41, R19: a cancelled waiter keeps nobody from their bytes."""
    budget, log = Budget(TOTAL), []
    ask(budget, 6, log)
    head = ask(budget, 7, log)
    ask(budget, 4, log)
    head.release()
    assert log == [6, 4]


def test_a_callback_that_fails_breaks_nobody_else(caplog):
    """R42, R18: bytes are given back and the next is granted although a callback raised."""
    budget, log = Budget(TOTAL), []
    first = ask(budget, TOTAL, log)

    def fails() -> None:
        raise RuntimeError("engine")

    budget.start(bad := budget.claim(4, fails))
    ask(budget, 5, log)
    first.release()
    assert log == [TOTAL, 5]
    bad.release()
    assert budget.used == 5
    assert "callback failed" in caplog.text


def test_callbacks_run_without_the_lock():
    """R69: a callback may use the budget that calls it."""
    budget, log = Budget(TOTAL), []
    budget.start(budget.claim(3, lambda: log.append(budget.used) or ask(budget, 2, log)))
    assert log == [3, 2]
    assert budget.used == 5


def test_a_claim_released_before_its_start_is_never_granted():
    """R16: a cancel that comes first wins."""
    budget, log = Budget(TOTAL), []
    claim = budget.claim(3, lambda: log.append(3))
    claim.release()
    budget.start(claim)
    assert (log, budget.used) == ([], 0)
