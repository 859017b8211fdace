"""What a receiver has granted, and the orders in which it may arrive."""

from __future__ import annotations

from pdctl.errors import HandoffError, ProtocolViolation
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.sink import Want
from pdctl.handoff.wire import End, Part


class Assembly:
    """Each layer of each page exactly once, in the order of a staircase (R28): a page's layers
    ascend without gaps, and no page has more layers than the page before it. Page by page and
    layer by layer both obey it, and so does what lies between.

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
        self._first = want.held_tokens // geometry.page_tokens
        self.pages = geometry.pages_for(want.tokens) - self._first
        """How many are to come."""
        self._came = [0] * self.pages
        """Layers of each."""

    def take(self, header: Part, pages: int = 1) -> None:
        """This piece is one that may come next, and those of the pages that follow it are;
        raises ProtocolViolation where it is not."""
        at = header.page - self._first
        if not 0 <= at <= self.pages - pages:
            raise self._out_of_order(header)
        # no page has more layers than one before it: those between have as many as both
        if not self._came[at] == header.first_layer == self._came[at + pages - 1]:
            raise self._out_of_order(header)
        after = header.first_layer + header.layers
        if after > (self._came[at - 1] if at else self._layers):
            raise self._out_of_order(header)
        self._came[at : at + pages] = [after] * pages

    @property
    def whole(self) -> bool:
        """Every layer of every page came: the last page has no more of them than any other."""
        return not self._came or self._came[-1] == self._layers

    def complete(self, end: End) -> int | None:
        """The first token where it was wanted; raises ProtocolViolation where any page or the
        token is missing."""
        if not self.whole or end.pages != self.pages:
            raise ProtocolViolation(f"the end of {end.pages} pages came, {self._due()}")
        if (end.first_token is not None) != self._first_token:
            raise ProtocolViolation("the first token was wanted and missing, or the reverse")
        return end.first_token

    def _out_of_order(self, header: Part) -> ProtocolViolation:
        return ProtocolViolation(
            f"page {header.page} from layer {header.first_layer} came, {self._due()}"
        )

    def _due(self) -> str:
        for at, came in enumerate(self._came):
            if came < self._layers:
                return f"page {self._first + at} from layer {came} was due"
        return f"the end of {self.pages} pages was due"
