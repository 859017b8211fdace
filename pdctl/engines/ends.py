"""A replica's end of the handoff, opened as its agent assigned it. In-engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from pdctl.engines.channel import Assignment, Failed
from pdctl.handoff.arena import Bytes
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.identity import Identity
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.receiver import Receiver
from pdctl.handoff.sender import Sender
from pdctl.handoff.store.client import StoreClient
from pdctl.handoff.transport.choice import chosen_reach, chosen_transport
from pdctl.topology.model import Role, Transport

log = logging.getLogger("pdctl.engines")


class Ends(NamedTuple):
    """A prefill replica sends, a decode replica receives, an ordinary one does neither. Whoever
    opened them closes them."""

    sender: Sender | None = None
    receiver: Receiver | None = None

    def listen(self) -> int | None:
        """The data port that now listens; None where this role does not send.

        Raises:
            PeerLost: it can't be listened on.
        """
        return self.sender.start() if self.sender is not None else None

    def close(self) -> None:
        """Bounded."""
        close_each(end.close for end in self if end is not None)


def open_store(assigned: Assignment, board: CounterBoard) -> StoreClient | None:
    """A client of the host's page store; None where this replica shares none. It dials by
    itself: until that store is there, every prompt is a miss."""
    if assigned.store is None:
        return None
    return StoreClient(assigned.store, contract=assigned.contract, board=board)


def close_each(steps: Iterable[Callable[[], object]]) -> None:
    """Takes every step of a clean-up; one that fails is logged and skips none of the next."""
    for step in steps:
        try:
            step()
        # clean-up goes on; the process ends in any case
        except Exception:
            log.exception("a clean-up step failed")


def open_ends(
    assigned: Assignment,
    board: CounterBoard,
    tell: Callable[[Failed], None],
    environment: Mapping[str, str],
    memory: Callable[[int], Bytes] | None = None,
) -> Ends:
    """Opens this role's end, unless its engine's own handoff is that; a sender is not started
    yet.

    Args:
        tell: gets every failed handoff, from the handoff's own threads.
        memory: makes what pages are sent from and pieces received into; None: ordinary memory.

    Raises:
        UsageError: the environment asks for a pacing that can't be.
        HandoffError: pages are to be read through NIXL, which does not work here.
    """

    def reporting(leg: str) -> Callable[[int, str, str], None]:
        def failed(room: int, cause: str, detail: str) -> None:
            log.warning("room=%s leg=%s failed: %s: %s", room, leg, cause, detail)
            tell(Failed(room=room, leg=leg, cause=cause, detail=detail))

        return failed

    if assigned.native:
        return Ends()
    identity = Identity(assigned.replica, assigned.key, assigned.contract.digest)
    geometry = PageGeometry.of(assigned.contract)
    transport = chosen_transport(assigned.certificate, environment)
    reach = chosen_reach(assigned.replica, assigned.transports, assigned.data_host)
    timeout_s = assigned.handoff.timeout_s
    if assigned.role is Role.DECODE:
        receiver = Receiver(
            identity,
            geometry,
            timeout_s=timeout_s,
            board=board,
            on_failed=reporting("decode"),
            memory=memory,
            reads=lambda prefill: assigned.transports.get(prefill) is Transport.NIXL,
            transport=transport,
            reach=reach,
        )
        return Ends(receiver=receiver)
    if assigned.role is not Role.PREFILL:
        return Ends()
    sender = Sender(
        identity,
        geometry,
        listen=(assigned.data_host, assigned.data_port or 0),
        budget_bytes=assigned.handoff.buffer_bytes,
        timeout_s=timeout_s,
        board=board,
        on_failed=reporting("prefill"),
        memory=memory,
        transport=transport,
        reach=reach,
    )
    return Ends(sender=sender)
