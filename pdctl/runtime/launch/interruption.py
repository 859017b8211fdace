"""Ctrl-C, SIGTERM and SIGHUP: the first cancels, later ones are told that it takes a moment."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import TypeVar

import anyio

from pdctl.errors import InterruptedLaunch

T = TypeVar("T")

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Watches for signals inside one event loop.

    Args:
        again: called for every signal after the first.
    """

    def __init__(self, again: Callable[[], None] = lambda: None) -> None:
        self._again = again
        self._act: Callable[[], object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.name: str | None = None
        """Of the first signal, once there was one."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self._loop = asyncio.get_running_loop()
        for number in NUMBERS:
            self._loop.add_signal_handler(number, self._caught, number)
        try:
            yield
        finally:
            for number in NUMBERS:
                self._loop.remove_signal_handler(number)

    def cancels(self, act: Callable[[], object]) -> None:
        """What the first signal does; at once where it has come already."""
        self._act = act
        if self.name is not None:
            act()

    def _caught(self, number: signal.Signals) -> None:
        if self.name is not None:
            self._again()
            return
        self.name = number.name
        if self._act is not None:
            self._act()


async def interruptible(work: Callable[[], Awaitable[T]]) -> T:
    """Runs `work`, which a signal cancels.

    Raises:
        InterruptedLaunch: it was interrupted before it was done.
    """
    interruption = Interruption()
    with interruption.watching(), anyio.CancelScope() as scope:
        interruption.cancels(scope.cancel)
        return await work()
    raise InterruptedLaunch(f"interrupted by {interruption.name}")


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Outside an event loop: any of the signals raises InterruptedLaunch in the main thread."""

    def caught(number: int, frame: FrameType | None) -> None:
        raise InterruptedLaunch(f"interrupted by {signal.Signals(number).name}")

    before = {number: signal.signal(number, caught) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
