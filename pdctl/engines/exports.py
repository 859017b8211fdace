"""What one step brings from an engine's KV memory into pages, while the forward computes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

log = logging.getLogger("pdctl.engines")

LATE = "after the forward, not while it computes"

Span = TypeVar("Span")
"""Positions of one prompt that a step brings into the engine's memory, as its adapter has them."""
Named = TypeVar("Named", contravariant=True)


class Taker(Protocol[Named]):
    """Who gets a span's pages."""

    def landed(self, span: Named, layers: int) -> None:
        """Any thread: the span stands in the pages, of the first `layers` layers."""
        ...

    def taken(self, span: Named) -> None:
        """Engine's thread, after the forward: every layer is copied, or will be soon."""
        ...

    def broke(self, error: BaseException) -> None:
        """Engine's thread: the pages can't be filled."""
        ...


class Memory(Protocol[Named]):
    """An engine's KV memory, as far as it is copied out of. A step is `begin_step`, then `gather`
    of each layer, in order; all on the engine's thread."""

    @property
    def names(self) -> Sequence[Hashable]:
        """Layers, as the engine calls them, in the model's order."""
        ...

    def begin_step(self, spans: Sequence[Named]) -> None:
        """Before every forward, also where there is nothing to copy: all that one step's copies
        need but the layer is prepared here. What the forward overwrites has been copied by then
        (R10)."""
        ...

    def gather(self, layer: int, landed: Callable[[], None]) -> None:
        """Copies that layer of the step's spans into their pages. Inside the forward: it copies,
        or enqueues the copy, and returns.

        Args:
            landed: called once the layer stands in the pages of every span; once, on any
                thread, in the layers' order. Of layers that land together the last one's alone.
        """
        ...


class Exports(Generic[Span]):
    """Each layer of a step's spans once, in the model's order. Engine's thread.

    A copy that fails ends what that step was to bring out; the engine and the others go on (R34).

    Args:
        by_layer: a layer leaves as soon as it is computed; else all do after the forward.
    """

    def __init__(self, memory: Memory[Span], *, by_layer: bool = True) -> None:
        self._memory = memory
        self._by_layer = by_layer
        self._taking: Sequence[tuple[Taker[Span], Span]] = ()
        self._next = 0
        self._told = False

    def begin(self, taking: Sequence[tuple[Taker[Span], Span]]) -> None:
        """Before the forward."""
        self._taking, self._next = taking, 0
        self._attempt(lambda: self._memory.begin_step([span for _, span in taking]))

    def saved(self, name: Hashable) -> None:
        """Inside the forward: that layer stands in the engine's memory. One that comes out of
        turn, and those that follow it, are left to `finish`."""
        names = self._memory.names
        if not self._by_layer:
            return
        if self._taking and self._next < len(names) and name == names[self._next]:
            self._gather()

    def finish(self) -> None:
        """After the forward: layers that the engine did not name are copied too."""
        late = len(self._memory.names) - self._next if self._taking else 0
        if late and self._by_layer and not self._told:
            self._told = True
            log.warning("it is not said when %d layers are computed: they leave %s", late, LATE)
        while self._taking and self._next < len(self._memory.names):
            self._gather()
        for taker, span in self._taking:
            taker.taken(span)
        self._taking = ()

    def fail(self, error: BaseException) -> None:
        """Nothing more of this step is copied, and its handoffs end."""
        for taker, _ in self._taking:
            taker.broke(error)
        self._taking = ()

    def _gather(self) -> None:
        layer, taking = self._next, self._taking
        self._next += 1

        def landed() -> None:
            for taker, span in taking:
                taker.landed(span, layer + 1)

        self._attempt(lambda: self._memory.gather(layer, landed))

    def _attempt(self, copy: Callable[[], None]) -> None:
        try:
            copy()
        # whatever the engine's memory raises, the forward goes on
        except Exception as error:
            log.exception("a step's export failed")
            self.fail(error)
