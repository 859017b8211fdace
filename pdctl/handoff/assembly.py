"""What a receiver has granted, and the only order in which it may arrive."""

from __future__ import annotations

from pdctl.errors import HandoffError, ProtocolViolation
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.sink import Want
from pdctl.handoff.wire import End, Header


class Assembly:
    """Pages in ascending order, each one's layers too, each exactly once (R28).

    Raises:
        HandoffError: the engine wants positions that were not offered.
    """

    def __init__(self, geometry: PageGeometry, want: Want, offered: int) -> None:
        in_range = 0 <= want.held_tokens <= want.tokens
        if not in_range or want.tokens not in (offered - 1, offered):
            raise HandoffError(
                f"the engine wants positions {want.held_tokens} to {want.tokens} of {offered}"
            )
        self._layers = geometry.layers
        self._first_token = want.first_token
        first = want.held_tokens // geometry.page_tokens
        self._end = max(first, geometry.pages_for(want.tokens))
        self.pages = self._end - first
        """How many are to come."""
        self._page = first
        self._layer = 0

    def take(self, header: Header) -> None:
        """The next piece is this one; raises ProtocolViolation where it is another."""
        expected = (self._page, self._layer)
        if self._page >= self._end or (header.page, header.first_layer) != expected:
            raise ProtocolViolation(
                f"page {header.page} from layer {header.first_layer} came, "
                f"page {self._page} from layer {self._layer} was due"
            )
        self._layer += header.layers
        if self._layer == self._layers:
            self._page, self._layer = self._page + 1, 0

    def complete(self, end: End) -> int | None:
        """The first token where it was wanted; raises ProtocolViolation where any page or the
        token is missing."""
        if self._page != self._end or self._layer or end.pages != self.pages:
            raise ProtocolViolation(
                f"the end came at page {self._page}, {self._end} were due "
                f"and {end.pages} were said to be sent"
            )
        if (end.first_token is not None) != self._first_token:
            raise ProtocolViolation("the first token was wanted and missing, or the reverse")
        return end.first_token
