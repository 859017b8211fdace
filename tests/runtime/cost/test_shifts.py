"""A load that shifts, without engines: what is measured, queued and decided, put together.

True times are given, and scatter; nothing but the requests that were taken tells of them. Bad luck
may outlast ten requests once in some thousand worlds: the same worlds are drawn in every run.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.runtime.cost.book import Book
from pdctl.runtime.cost.deciding import EXPLORED, SHARE, Decider, Decision, Option
from pdctl.runtime.cost.queues import Queues
from pdctl.runtime.cost.record import PathRecord, Sample

PAIR, ALONE = "p0>d0", "d0"
WITHIN = 10
SCATTER = 0.05
"""Standard deviation of a time's logarithm."""
CLEAR = 1.4
"""Times that differ by as much differ for everybody."""
Times = dict[str, Callable[[int], float]]

same_worlds = settings(derandomize=True)

seeds = st.integers(0, 2**32)
lengths = st.integers(50, 4000)
factors = st.floats(CLEAR, 20.0)


class World:
    """One pair, and the choice before each request; a request every second."""

    def __init__(self, seed: int, **times: float) -> None:
        """Seconds per 1,000 tokens."""
        self.rng = random.Random(seed)
        self.per_thousand = {PAIR: times["pair"], ALONE: times["alone"]}
        self.dead = False
        self.now = 0.0
        self.book, self.queues, self.decider = Book(), Queues(), Decider()
        for path in (PAIR, ALONE):
            self.book.open(path, PathRecord(identity="i", contract="c", versions=()))
            for tokens in (48, 48, 192, 192, 768, 768):
                self.book.sampled(path, Sample(tokens=tokens, ttft_s=self.took(path, tokens), at=0))

    def took(self, path: str, tokens: int) -> float:
        noise = self.rng.lognormvariate(0.0, SCATTER)
        return (0.005 + self.per_thousand[path] * tokens / 1000) * noise

    def ask(self, tokens: int) -> Decision:
        self.now += 1.0
        options = []
        for path in (ALONE,) if self.dead else (PAIR, ALONE):
            alone_s = self.book.expected_s(path, tokens, self.now)
            assert alone_s is not None
            total_s = self.queues.waits(path, self.now).total_s(alone_s)
            far = self.book.extrapolates(path, tokens)
            options.append(Option(path=path, total_s=total_s, extrapolated=far))
        decision = self.decider.decide(options, tokens)
        path = decision.path
        curve = self.book.curve(path)
        assert curve is not None
        waits = self.queues.waits(path, self.now)
        own_s = self.took(path, tokens)
        taken_s, expected_s = waits.total_s(own_s), waits.total_s(curve.at(tokens))
        self.book.seen(path, tokens, taken_s, expected_s, self.now)
        if waits.total_s(0.0) == 0.0:
            self.book.sampled(path, Sample(tokens=tokens, ttft_s=own_s, at=self.now))
        return decision

    def follows(self, path: str, tokens: int) -> bool:
        """Whether within `WITHIN` requests three in a row took it, explored ones aside."""
        row = 0
        for _ in range(WITHIN):
            decision = self.ask(tokens)
            if decision.reason != EXPLORED:
                row = row + 1 if decision.path == path else 0
            if row == 3:
                return True
        return False


@same_worlds
@given(seeds, lengths, factors)
def test_the_faster_path_is_taken_from_the_beginning(seed: int, tokens: int, factor: float) -> None:
    assert World(seed, pair=1.0, alone=factor).follows(PAIR, max(tokens, 200))
    assert World(seed, pair=factor, alone=1.0).follows(ALONE, max(tokens, 200))


@same_worlds
@given(seeds, st.integers(1600, 8000), st.floats(CLEAR, 1.6))
def test_far_beyond_what_was_measured_the_faster_path_is_found(
    seed: int, tokens: int, factor: float
) -> None:
    """Scatter at 768 tokens is many times as much at 8,000: the other path is tried there."""
    assert World(seed, pair=1.0, alone=factor).follows(PAIR, tokens)
    assert World(seed, pair=factor, alone=1.0).follows(ALONE, tokens)


@same_worlds
@given(seeds, lengths, factors, factors)
def test_a_link_that_becomes_slow_is_followed(
    seed: int, tokens: int, before: float, after: float
) -> None:
    """Whatever it was faster by, and is slower by now."""
    world = World(seed, pair=1.0, alone=before)
    tokens = max(tokens, 200)
    assert world.follows(PAIR, tokens)
    world.per_thousand[PAIR] = before * after
    assert world.follows(ALONE, tokens)


@same_worlds
@given(seeds, st.integers(500, 768), st.integers(2, 8))
def test_a_queue_on_the_decode_replica_is_followed_and_its_end_too(
    seed: int, tokens: int, queued: int
) -> None:
    """A handoff passes while the queue does."""
    world = World(seed, pair=1.5, alone=1.0)
    assert world.follows(ALONE, tokens)
    pending = [
        world.queues.enter(ALONE, tokens, tokens / 1000, world.now + 1.0) for _ in range(queued)
    ]
    assert world.ask(tokens).path == PAIR
    for each in pending:
        world.queues.leave(each, world.now)
    assert world.follows(ALONE, tokens)


@same_worlds
@given(seeds, lengths, factors)
def test_a_dead_prefill_replica_is_followed_at_once_and_so_is_its_return(
    seed: int, tokens: int, factor: float
) -> None:
    world = World(seed, pair=1.0, alone=factor)
    tokens = max(tokens, 200)
    assert world.follows(PAIR, tokens)
    world.dead = True
    assert all(world.ask(tokens).path == ALONE for _ in range(3))
    world.dead = False
    assert world.follows(PAIR, tokens)


@settings(derandomize=True, max_examples=25)
@given(seeds, st.floats(CLEAR, 4.0))
def test_a_link_that_becomes_fast_again_is_found_by_exploring(seed: int, factor: float) -> None:
    """Within the bound of what exploring may cost, so the later the slower it was."""
    world = World(seed, pair=1.0, alone=2.0)
    world.per_thousand[PAIR] = 2.0 * factor
    for _ in range(40):
        world.ask(1000)
    assert world.follows(ALONE, 1000)
    world.per_thousand[PAIR] = 1.0
    for _ in range(2000):
        decision = world.ask(1000)
        if decision.path == PAIR and decision.reason != EXPLORED:
            break
    assert decision.path == PAIR
    assert world.decider.exploring_s <= SHARE * world.decider.expected_s
