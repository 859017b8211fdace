"""Which layers of which page can leave, and when: the sender's decisions, without I/O or locks.

Pages are sent over and over, each time with the layers that have landed since:

    page       0        1        2
    layer 0    first    second   third
    layer 1    fourth   fifth    sixth   …

A page that has several layers to send sends them together, up to `PIECE_BYTES`; one that has
all of them sends all of them before the next page has its turn.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterator

import msgspec

from pdctl.errors import ProtocolViolation
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.wire import End, Grant

PIECE_BYTES = 512 << 10
"""Small enough that the kernel copies from the cache what was just hashed (bench/data_plane.py)."""
DEVICE_PIECE_BYTES = 4 << 20
"""In a device's memory a piece costs what it is asked with, not its bytes."""


class PagePart(msgspec.Struct, frozen=True):
    """Send these layers of this page now, as one piece; or of several, each a piece."""

    page: int
    first_layer: int
    layers: int
    slots: int
    """How many of the last page's first slots were granted; those past them are to be zero
    (R30)."""
    pages: int = 1
    """Consecutive ones, from `page` on."""


class Schedule:
    """One prompt's progress against its grant. The caller's lock guards it.

    Args:
        together: what several pages have to send leaves as one part.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        tokens: int,
        piece_bytes: int | None = None,
        *,
        together: bool = False,
    ) -> None:
        self._geometry = geometry
        self._tokens = tokens
        self._together = together
        self._piece_layers = max(1, (piece_bytes or PIECE_BYTES) // geometry.layer_bytes)
        self._written = [0] * geometry.layers
        """Per layer: positions [0, n) stand in the pages. Never more than of the one before."""
        self.last_begun = False
        """The last position is being written: each layer of its page is held back until it is."""
        self.finished = False
        self.first_token: int | None = None
        self.grant: Grant | None = None
        self._first = 0
        self._sent: list[int] = []
        """Per granted page: layers sent. Never more than of the page before."""
        self._turn = 0
        """The page, counted from the first granted one, that sends as long as it can."""

    def write(self, tokens: int, layers: int | None = None) -> bool:
        """Positions [0, tokens) of layers [0, layers), by default of all, stand in the pages;
        False where that is nothing new."""
        stop = self._geometry.layers if layers is None else layers
        start = self._layers_with(tokens)
        if start >= stop:
            return False
        self._written[start:stop] = [tokens] * (stop - start)
        return True

    def granted(self, grant: Grant) -> None:
        """Raises ProtocolViolation where it asks for what was not offered."""
        allowed = (self._tokens - 1, self._tokens)
        if grant.tokens not in allowed or grant.held_tokens > grant.tokens:
            raise ProtocolViolation(
                f"granted positions {grant.held_tokens} to {grant.tokens} of {self._tokens}"
            )
        self.grant = grant
        self._first = grant.held_tokens // self._geometry.page_tokens
        self._sent = [0] * (self._geometry.pages_for(grant.tokens) - self._first)

    @property
    def written(self) -> int:
        """Positions [0, written) of every layer stand in the pages."""
        return self._written[-1]

    @property
    def needed(self) -> bool:
        """Everything that the grant wants of the pages is written."""
        return self.grant is not None and self.written >= self.grant.tokens

    @property
    def wants_last(self) -> bool:
        """False once it is known that the last position is not wanted."""
        return self.grant is None or self.grant.tokens == self._tokens

    def step(self) -> PagePart | End | None:
        """What to send next; None while it is not computed yet. Moves on by what it returns."""
        if self.grant is None:
            return None
        if self._sent and self._sent[-1] < self._geometry.layers:
            return self._block(self.grant) if self._together else self._part(self.grant)
        # also where nothing was wanted: the engine may still be writing, and Done frees the pages
        if not self.needed or self._being_written:
            return None
        if self.grant.first_token and not self.finished:
            return None
        token = self.first_token if self.grant.first_token else None
        return End(pages=len(self._sent), first_token=token)

    @property
    def _being_written(self) -> bool:
        return self.last_begun and not self.finished and self.written < self._tokens

    def _part(self, grant: Grant) -> PagePart | None:
        for at in self._turns(grant):
            if layers := self._unsent(at, grant):
                self._turn = at
                return self._leave(at, at + 1, layers, grant)
        return None

    def _block(self, grant: Grant) -> PagePart | None:
        """Of pages that have sent the same, the first has the most to send, and where it has
        nothing none has."""
        at = self._past(self._geometry.layers)
        while at < len(self._sent):
            stop = self._past(self._sent[at])
            if layers := self._unsent(at, grant):
                ready = self._pages_with(self._sent[at] + layers, grant)
                return self._leave(at, max(at + 1, min(stop, ready)), layers, grant)
            at = stop
        return None

    def _leave(self, at: int, stop: int, layers: int, grant: Grant) -> PagePart:
        size, sent = self._geometry.page_tokens, self._sent[at]
        self._sent[at:stop] = [sent + layers] * (stop - at)
        slots = min(size, grant.tokens + size - (self._first + stop) * size)
        return PagePart(self._first + at, sent, layers, slots, stop - at)

    def _unsent(self, at: int, grant: Grant) -> int:
        """Layers of a page that one piece can bring."""
        stop = (self._first + at + 1) * self._geometry.page_tokens
        return max(0, min(self._ready(at, stop, grant) - self._sent[at], self._piece_layers))

    def _pages_with(self, layers: int, grant: Grant) -> int:
        """How many granted pages have so many layers written, whatever was sent of those before
        them."""
        written, size = self._written[layers - 1], self._geometry.page_tokens
        ends_here = (self._first + len(self._sent)) * size >= self._tokens
        wanted = self._tokens if self._being_written and ends_here else grant.tokens
        return len(self._sent) if written >= wanted else written // size - self._first

    def _past(self, layers: int) -> int:
        """The first page that has sent fewer."""
        return bisect_right(self._sent, -layers, key=operator.neg)

    def _turns(self, grant: Grant) -> Iterator[int]:
        """Pages that are begun, but not sent whole, from the one whose turn it is."""
        ahead = self._written[0]
        stop = len(self._sent)
        if ahead < grant.tokens:
            stop = min(stop, ahead // self._geometry.page_tokens - self._first)
        start = self._past(self._geometry.layers)
        turn = max(start, self._turn)
        yield from range(turn, stop)
        yield from range(start, min(turn, stop))

    def _ready(self, at: int, stop: int, grant: Grant) -> int:
        """Layers of a page, which ends before position `stop`, that may have been sent."""
        held_back = self._being_written and stop >= self._tokens
        written = self._layers_with(self._tokens if held_back else min(stop, grant.tokens))
        return min(written, self._sent[at - 1]) if at else written

    def _layers_with(self, tokens: int) -> int:
        """How many layers have positions [0, tokens) written."""
        return bisect_right(self._written, -tokens, key=operator.neg)
