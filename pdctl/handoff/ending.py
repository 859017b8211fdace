"""What a replica's sender and its receiver have in common: whose end it is, and how the end of
a handoff is counted and reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import NotRequired, TypedDict, Unpack

from pdctl.errors import HandoffCancelled, HandoffError
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.identity import Identity
from pdctl.handoff.lease import checked_timeout
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.pulse import guarded
from pdctl.handoff.transport.interface import Transport
from pdctl.handoff.transport.reach import Reach
from pdctl.handoff.transport.tcp import TcpTransport
from pdctl.trace import monotonic_s

OnFailed = Callable[[int, str, str], None]
"""(room, cause, detail) of every handoff that failed; cancelled ones did not."""


class Common(TypedDict):
    """Arguments of either end.

    timeout_s   of what no leg bounds
    on_failed   told of each failed handoff before its engine is
    clock       monotonic seconds
    transport   TCP where it is left away
    reach       pieces are read out of the sender's memory; this end closes it. None, or left
                away: they come over the connection
    """

    timeout_s: float
    board: CounterBoard
    on_failed: OnFailed
    clock: NotRequired[Callable[[], float]]
    transport: NotRequired[Transport]
    reach: NotRequired[Reach | None]


class ReplicaEnd:
    """Base of Sender and Receiver.

    Raises:
        HandoffExpired: `timeout_s` is not a positive number of seconds.
    """

    def __init__(
        self, identity: Identity, geometry: PageGeometry, **common: Unpack[Common]
    ) -> None:
        self._identity = identity
        self._geometry = geometry
        self._timeout_s = checked_timeout(common["timeout_s"])
        self._board = common["board"]
        self._on_failed = common["on_failed"]
        self._clock = common.get("clock", monotonic_s)
        self._transport = common.get("transport") or TcpTransport()
        self._reach = common.get("reach")

    def _close_reach(self) -> None:
        if self._reach is not None:
            self._reach.close()

    def _count_end(self, room: int, peer: str, error: HandoffError | None, **amounts: int) -> None:
        """Counts one end, and `amounts` with it, in one step; reports a failure."""
        if error is None:
            self._board.add(peer=peer, handoffs_completed=1, **amounts)
        elif isinstance(error, HandoffCancelled):
            self._board.add(peer=peer, handoffs_cancelled=1, **amounts)
        else:
            cause, detail = error.cause, error.message
            self._board.failure(cause)
            self._board.add(peer=peer, handoffs_failed=1, **amounts)
            guarded(lambda: self._on_failed(room, cause, detail))
