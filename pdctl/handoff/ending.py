"""How a handoff's end is counted, the same on both ends."""

from __future__ import annotations

from collections.abc import Callable

from pdctl.errors import HandoffCancelled, HandoffError
from pdctl.handoff.counters import CounterBoard

OnFailed = Callable[[int, str, str], None]
"""(room, cause, detail) of every handoff that failed; cancelled ones did not."""


def count_end(board: CounterBoard, peer: str, error: HandoffError | None, **amounts: int) -> None:
    """Counts one end, and `amounts` with it, in one step."""
    if error is None:
        board.add(peer=peer, handoffs_completed=1, **amounts)
    elif isinstance(error, HandoffCancelled):
        board.add(peer=peer, handoffs_cancelled=1, **amounts)
    else:
        board.failure(error.cause)
        board.add(peer=peer, handoffs_failed=1, **amounts)
