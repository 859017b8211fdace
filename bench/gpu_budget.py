"""How long a run may take, and what it left out for want of time."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """Counted from when it is made. A cell is asked for before it begins, and one that does not
    fit is named in `left_out`: what is in a result file was measured whole."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._until_s = clock() + seconds
        self._clock = clock
        self.seconds = seconds
        self.left_out: list[str] = []

    @property
    def left_s(self) -> float:
        return max(0.0, self._until_s - self._clock())

    @property
    def used_s(self) -> float:
        return self.seconds - self.left_s

    def allows(self, cell: str, expected_s: float = 0.0) -> bool:
        """Whether a cell that takes so long still ends in time."""
        if self.left_s > expected_s:
            return True
        if cell not in self.left_out:
            self.left_out.append(cell)
            print(f"left out: {cell}, {self.left_s:.0f} s are left", flush=True)
        return False

    def part(self, share: float) -> Budget:
        """A budget of that share of what is left, on the same list of what was left out."""
        some = Budget(self.left_s * share, self._clock)
        some.left_out = self.left_out
        return some
