"""Which page of a prompt can leave, and when: the sender's decisions, without I/O or locks."""

from __future__ import annotations

import msgspec

from pdctl.errors import ProtocolViolation
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.wire import End, Grant


class PagePart(msgspec.Struct, frozen=True):
    """Send this page now, in pieces of whole layers."""

    page: int
    slots: int
    """How many of its first slots were granted; those past them are to be zero (R30)."""


class Schedule:
    """One prompt's progress against its grant. The caller's lock guards it."""

    def __init__(self, geometry: PageGeometry, tokens: int) -> None:
        self._geometry = geometry
        self._tokens = tokens
        self.written = 0
        """Positions [0, written) stand in the pages."""
        self.last_begun = False
        """The last position is being written: its page is held back until it is."""
        self.finished = False
        self.first_token: int | None = None
        self.grant: Grant | None = None
        self._first = self._next = self._end = 0

    def granted(self, grant: Grant) -> None:
        """Raises ProtocolViolation where it asks for what was not offered."""
        allowed = (self._tokens - 1, self._tokens)
        if grant.tokens not in allowed or grant.held_tokens > grant.tokens:
            raise ProtocolViolation(
                f"granted positions {grant.held_tokens} to {grant.tokens} of {self._tokens}"
            )
        self.grant = grant
        self._first = self._next = grant.held_tokens // self._geometry.page_tokens
        self._end = max(self._first, self._geometry.pages_for(grant.tokens))

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
        if self._next < self._end:
            return self._page(self.grant)
        # also where nothing was wanted: the engine may still be writing, and Done frees the pages
        if not self.needed or self._being_written:
            return None
        if self.grant.first_token and not self.finished:
            return None
        token = self.first_token if self.grant.first_token else None
        return End(pages=self._end - self._first, first_token=token)

    @property
    def _being_written(self) -> bool:
        return self.last_begun and not self.finished and self.written < self._tokens

    def _page(self, grant: Grant) -> PagePart | None:
        size = self._geometry.page_tokens
        stop = (self._next + 1) * size
        if self.written < min(stop, grant.tokens):
            return None
        if self._being_written and stop >= self._tokens:
            return None
        self._next += 1
        return PagePart(self._next - 1, min(size, grant.tokens + size - stop))
