"""The straight way between the two halves where vLLM has both in one process and one thread, as it
has on a single GPU.

What travels in vLLM's metadata goes out with a step and comes back with its output, which is two
or three steps that compute nothing, a millisecond of rest in each.
"""

from __future__ import annotations

from typing import Protocol

from pdctl.engines.vllm.steps import Begin, Notice, Seek


class Line(Protocol):
    """The worker's half, as the scheduler's half calls it. The engine's one thread; none waits."""

    def begin(self, begin: Begin) -> None:
        """As in a step's orders."""
        ...

    def seek(self, seek: Seek) -> None:
        """As in a step's orders."""
        ...

    def news(self) -> list[Notice]:
        """What has come since the last call. From the first one on nothing of it goes out with a
        step, whose output vLLM reads after it has scheduled the next one."""
        ...


_worker: Line | None = None


def join(worker: Line) -> None:
    """This process has a worker's half."""
    global _worker
    _worker = worker


def line() -> Line | None:
    """None where the worker's half is in another process."""
    return _worker
