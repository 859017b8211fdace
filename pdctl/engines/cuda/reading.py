"""A step's tokens out of an engine's KV memory on a GPU into pages, several layers at a time.

Enqueued inside the forward pass once it has enqueued those layers, landed while it computes the
next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdctl.engines.cuda.kernel import DEVICE_PROGRAMS, PROGRAMS, Copies, Tokens
from pdctl.engines.cuda.stream import Landings, Mark, SideStream
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.schedule import PIECE_BYTES

FIRST_BYTES = 1 << 20
"""The first layers of a step leave once they have as many: a slow link is busy from then on."""
GROUP_BYTES = 4 << 20
PIECE_PART_BYTES = PIECE_BYTES // 2
"""Those after them leave together until they have so many bytes in all, and in each page: a launch
costs the engine's thread 0.1 ms whatever it copies, and each landing is a sweep of pieces over
every page."""
DEVICE_GROUP_BYTES = 16 << 20
"""Where pages lie in the device's own memory, the first layers too: the other end reads as much at
once, and what it reads last is there within a fraction of a millisecond."""


@dataclass
class _Step:
    """It lives until the last of it has landed."""

    tokens: Tokens | None = None
    kept: object = None
    near: bool = False
    first: int = 0
    """Of the layers that are not enqueued yet."""
    waiting_bytes: int = 0


class Reader:
    """The engine's thread: `begin` before each forward, then `gather` of each layer, in order."""

    def __init__(self, copies: Copies, side: SideStream, pages: PageGeometry) -> None:
        self._copies, self._side, self._pages = copies, side, pages
        self._landings = Landings()
        self._layer_token_bytes = pages.layer_bytes // pages.page_tokens
        self._step = _Step()
        self._last: Mark | None = None

    def hold_model(self) -> None:
        """What the model does from now on comes after everything that was enqueued here: it may
        overwrite what that reads."""
        if self._last is not None:
            self._side.hold_model(self._last)
            self._last = None

    def begin(self, tokens: Tokens, kept: object, *, near: bool = False) -> None:
        """Args:
        kept: memory that the GPU writes until the step has landed.
        near: it is the device's own.
        """
        self._step = _Step(tokens, kept, near)

    def gather(self, layer: int, landed: Callable[[], None]) -> None:
        """As `exports.Memory.gather`."""
        step = self._step
        tokens = step.tokens
        assert tokens is not None, "begin() comes first"
        step.waiting_bytes += len(tokens.places) * self._layer_token_bytes
        layers = range(step.first, layer + 1)
        if not self._leave(layers, step):
            return
        programs = DEVICE_PROGRAMS if step.near else PROGRAMS
        mark = self._side.after_model(
            lambda: self._copies.to_pages(tokens, layers, programs=programs)
        )
        self._landings.add(mark, landed, step)
        self._last, step.first, step.waiting_bytes = mark, layer + 1, 0
        if layers.stop == self._pages.layers:
            # the pages are their handoffs' alone once they have landed
            self._step = _Step()

    def close(self) -> None:
        """Bounded: what is under way lands first."""
        self._landings.close()

    def _leave(self, layers: range, step: _Step) -> bool:
        waiting_bytes = step.waiting_bytes
        if layers.stop == self._pages.layers:
            return True
        if step.near:
            return waiting_bytes >= DEVICE_GROUP_BYTES
        if layers.start == 0:
            return waiting_bytes >= FIRST_BYTES
        part_bytes = len(layers) * self._pages.layer_bytes
        return waiting_bytes >= GROUP_BYTES and part_bytes >= PIECE_PART_BYTES
