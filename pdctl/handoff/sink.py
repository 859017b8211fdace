"""The seam between a receiver and the engine that owns the KV memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pdctl.errors import HandoffError
from pdctl.handoff.device import Run
from pdctl.handoff.page import Patterns
from pdctl.topology.model import PAGE_TOKENS

HELD_PIECES = 8
"""How many of the last pieces stay as they were, where the receiver was given its memory."""


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """What a receiver grants: positions [held_tokens, tokens).

    `tokens` is the offered number, or one less where the engine recomputes the last token.
    Whole pages travel: the first one's slots before held_tokens % 64 are not to be written.
    """

    tokens: int
    held_tokens: int = 0
    first_token: bool = False


class Piece(msgspec.Struct, frozen=True):
    """The same layers of consecutive pages, which were read into a device's memory:
    `[pages, layers, 2, page_tokens, kv_heads, head_dim]`."""

    page: int
    first_layer: int
    layers: int
    at: Run
    pages: int = 1

    @property
    def positions(self) -> range:
        """Of the prompt: all that these pages have."""
        return range(self.page * PAGE_TOKENS, (self.page + self.pages) * PAGE_TOKENS)


class PageSink(Protocol):
    """The engine's side of one handoff. Calls come one at a time, from the handoff's threads.

    Order: `offered`, `write` any number of times, then `commit`; or `abort` at any moment,
    also first. After `commit` has returned or `abort` was called there are no more calls.
    """

    def offered(self, tokens: int, deadline: float) -> Want:
        """Allocates for a prompt of that many tokens; may block until the engine has room, up
        to `deadline` (seconds of the receiver's clock). A cancel is not delivered here: where
        the engine cancels an Inbound it must also end its own wait, since `abort` follows the
        return. Raising ends the handoff; the sender is told the error's cause."""
        ...

    def write(self, page: int, first_layer: int, piece: Patterns) -> None:
        """Places `[layers, 2, page_tokens, kv_heads, head_dim]`, checked, read-only in spirit:
        the memory is reused after the return, or as `HELD_PIECES` says. A page's layers come in
        order, and no page is ahead of the one before it; pages may come layer by layer."""
        ...

    def commit(self, first_token: int | None) -> None:
        """Everything has landed; the sender is told Done after the return. Raising ends the
        handoff: then `abort` follows."""
        ...

    def abort(self, error: HandoffError) -> None:
        """Nothing is committed; the memory is the engine's again."""
        ...


class DeviceSink(PageSink, Protocol):
    """Of an engine that takes pieces from a device's memory: then there is no `write`."""

    def write_from(self, pieces: Sequence[Piece]) -> Callable[[], bool]:
        """Begins to place them, in order, and returns without waiting for the device. What it
        returns says, without waiting and on any thread, whether all of them are placed: until then
        nothing else is read into their memory. Raising ends the handoff, and means that nothing
        reads them any more. `commit` and `abort` return only when all of them are placed."""
        ...
