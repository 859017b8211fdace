"""What one step brings from vLLM's blocks into pages, while the forward computes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from pdctl.engines.vllm.interface import Blocks, Span

log = logging.getLogger("pdctl.engines.vllm")

LATE = "after the forward, not while it computes"


class Taker(Protocol):
    """Who gets a span's pages."""

    def landed(self, span: Span, layers: int) -> None:
        """Any thread: the span stands in the pages, of the first `layers` layers."""
        ...

    def taken(self, span: Span) -> None:
        """Worker thread, after the forward: every layer of the span is copied, or will be soon."""
        ...

    def broke(self, error: BaseException) -> None:
        """Worker thread: the pages can't be filled."""
        ...


Taking = Sequence[tuple[Taker, Span]]


class Exports:
    """Each layer of a step's spans once, in the model's order. Worker thread.

    A copy that fails ends what that step was to bring out; the engine and the others go on (R34).

    Args:
        by_layer: a layer leaves as soon as it is computed; else all do after the forward.
    """

    def __init__(self, blocks: Blocks, *, by_layer: bool = True) -> None:
        self._blocks = blocks
        self._by_layer = by_layer
        self._taking: Taking = ()
        self._next = 0
        self._told = False

    def begin(self, taking: Taking) -> None:
        """Before the forward."""
        self._taking, self._next = taking, 0
        self._attempt(lambda: self._blocks.begin_step([span for _, span in taking]))

    def saved(self, name: str) -> None:
        """Inside the forward: that layer stands in the blocks. One that comes out of turn, and
        those that follow it, are left to `finish`."""
        names = self._blocks.names
        if not self._by_layer:
            return
        if self._taking and self._next < len(names) and name == names[self._next]:
            self._gather()

    def finish(self) -> None:
        """After the forward: layers that vLLM did not name are copied too."""
        late = len(self._blocks.names) - self._next if self._taking else 0
        if late and self._by_layer and not self._told:
            self._told = True
            log.warning("vLLM does not say when %d layers are computed: they leave %s", late, LATE)
        while self._taking and self._next < len(self._blocks.names):
            self._gather()
        for leg, span in self._taking:
            leg.taken(span)
        self._taking = ()

    def fail(self, error: BaseException) -> None:
        """Nothing more of this step is copied, and its handoffs end."""
        for leg, _ in self._taking:
            leg.broke(error)
        self._taking = ()

    def _gather(self) -> None:
        layer, taking = self._next, self._taking
        self._next += 1

        def landed() -> None:
            for leg, span in taking:
                leg.landed(span, layer + 1)

        self._attempt(lambda: self._blocks.gather(layer, landed))

    def _attempt(self, copy: Callable[[], None]) -> None:
        try:
            copy()
        # whatever the engine's memory raises, the forward goes on
        except Exception as error:
            log.exception("a step's export failed")
            self.fail(error)
