"""What a decode replica takes from its host's page store, ahead of the sender."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdctl.handoff.page import Patterns
from pdctl.handoff.store.interface import PageStore
from pdctl.topology.model import PAGE_TOKENS


def take_ahead(
    store: PageStore,
    token_ids: Sequence[int],
    salt: str,
    *,
    held: int,
    stop: int,
    fill: Callable[[Sequence[Patterns], int, int], None],
) -> int:
    """Fills positions [held, n) from full pages that this host's store has; that n, at most
    `stop`. Where the store has none, or goes away meanwhile, it is `held`.

    Less than a page costs less to receive than to look for. Pages that are only on their way
    into the store are not waited for: the sender has them.

    Args:
        fill: gets the prompt's first pages, and which positions of them it is to place. What it
            raises comes out of here.
    """
    if stop - held < PAGE_TOKENS:
        return held
    loan = store.borrow(store.prompt(token_ids, salt).pages, 0.0)
    try:
        reached = max(held, min(loan.tokens, stop))
        if reached > held:
            fill(loan.pages, held, reached)
    except BaseException:
        loan.release()
        raise
    return reached if loan.release(reached - held) else held
