"""The seam between an engine's adapter and its host's page store.

Nothing here raises for a reason of the store's: a store that is away, late or full is a miss,
and what can't be stored isn't. Deadlines are seconds from the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pdctl.handoff.page import Patterns
from pdctl.handoff.store.keys import PromptKeys

HOLD_S = 2.0
"""What a prompt may wait for its pages, those of other hosts included, before it is computed."""


class StoreSeat(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replica finds its host's store; in its Assignment."""

    socket: str
    """Unix socket, 0600, of the same host."""


class Loan(Protocol):
    """Pages that stay as they are until `release`. Any thread; one at a time."""

    @property
    def tokens(self) -> int:
        """Positions [0, tokens) are in the pages; 0: a miss. It may be the whole prompt: an
        engine that recomputes the last token uses n - 1 of them."""
        ...

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Of its pages, in order; the last may be a partial tail's. What `borrow` takes, in any
        process of this host, for as long as this loan is not released."""
        ...

    @property
    def pages(self) -> Sequence[Patterns]:
        """Read-only `[layers, 2, page_tokens, kv_heads, head_dim]` each, in shared memory: copy
        from them, keep none of them past `release`."""
        ...

    def release(self, used_tokens: int = 0) -> bool:
        """Once, always; it does not wait. False: the store went away meanwhile, so that what was
        copied is to be thrown away.

        Args:
            used_tokens: how many positions the engine took over, for the counters.
        """
        ...


class PageStore(Protocol):
    """An engine's end of its host's store. Thread-safe.

    Calls that wait (`hold`, `borrow`, `publish`, `held`) are for threads that may; `hold_soon`
    and `publish_soon` return at once and are the ones for a scheduler's or a loop's thread.
    """

    def prompt(self, token_ids: Sequence[int], salt: str = "") -> PromptKeys:
        """The keys of a prompt. No I/O. Raises ValueError as `keys.prompt_keys`."""
        ...

    def hold(self, prompt: PromptKeys, timeout_s: float = HOLD_S) -> Loan:
        """The longest prefix that this host's store has, or that it could bring from other
        hosts' in time; pinned."""
        ...

    def hold_soon(
        self, prompt: PromptKeys, told: Callable[[Loan], None], timeout_s: float = HOLD_S
    ) -> None:
        """The same on a thread of the client's own, where `told` is called, once, always: with a
        miss where too many wait. A loan that nobody wants any more is to be released there."""
        ...

    def borrow(self, keys: Sequence[bytes], timeout_s: float = HOLD_S) -> Loan:
        """The pages of the leading keys that this host's store has, others' not asked; `tokens`
        counts each of them as full."""
        ...

    def held(self, keys: Sequence[bytes], timeout_s: float = HOLD_S) -> int:
        """How many of the leading keys this host's store has. Pins nothing, refreshes nothing."""
        ...

    def publish(
        self,
        keys: Sequence[bytes],
        write: Callable[[int, Patterns], None],
        *,
        parent: bytes | None = None,
        timeout_s: float = HOLD_S,
    ) -> int:
        """Stores pages that the store has not. Every one or, where there is no room, none.

        Args:
            keys: consecutive pages of one chain.
            write: fills one page, given its place in `keys` and memory as in `Loan.pages`, whole,
                slots past the last token with zero. It may raise: then nothing is stored.
            parent: the key of the page before the first; None where that is a prompt's first.

        Returns:
            How many were written.
        """
        ...

    def publish_soon(
        self,
        keys: Sequence[bytes],
        pages: Sequence[Patterns] | Patterns,
        *,
        parent: bytes | None = None,
    ) -> bool:
        """The same on a thread of the client's own, from one `[layers, 2, tokens, kv_heads,
        head_dim]` per key, of `page_tokens` or, for a partial tail, fewer tokens; they are the
        client's from now on. False: too much waits already, and these are not stored."""
        ...

    def close(self) -> None:
        """Bounded; loans that are out are misses from now on."""
        ...
