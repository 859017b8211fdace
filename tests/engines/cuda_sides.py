"""Streams beside a model's, for copies that run in Triton's interpreter."""

from __future__ import annotations

import threading
from collections.abc import Callable

WAIT_S = 60.0
ONE_AT_A_TIME = threading.RLock()
"""Triton's interpreter puts functions of its own in place of Triton's while it runs a kernel."""


class Inline:
    """Its work is done when it is given."""

    def after_model(self, work: Callable[[], None]) -> Inline:
        return self.run(work)

    def run(self, work: Callable[[], None]) -> Inline:
        with ONE_AT_A_TIME:
            work()
        return self

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True

    def hold_side(self) -> None:
        return

    def hold_model(self, mark: Inline) -> None:
        return


class Late:
    """Its work is done as late as it may be: when its mark is waited for, or that of work given
    after it; and not before `go` is set."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.held: list[LateMark] = []
        """Marks that the model's work was put behind."""
        self.fenced = 0
        """How often work was put behind the model's."""
        self.go = threading.Event()
        self.go.set()

    def after_model(self, work: Callable[[], None]) -> LateMark:
        return self.run(work)

    def run(self, work: Callable[[], None]) -> LateMark:
        self.waiting.append(work)
        return LateMark(self, work)

    def hold_side(self) -> None:
        self.fenced += 1

    def hold_model(self, mark: LateMark) -> None:
        self.held.append(mark)


class LateMark:
    def __init__(self, side: Late, work: Callable[[], None]) -> None:
        self._side, self._work = side, work

    def synchronize(self) -> None:
        assert self._side.go.wait(WAIT_S)
        with ONE_AT_A_TIME:
            while self._work in self._side.waiting:
                self._side.waiting.pop(0)()

    def query(self) -> bool:
        return self._work not in self._side.waiting
