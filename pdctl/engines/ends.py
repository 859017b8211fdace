"""A replica's end of the handoff, opened as its agent assigned it. In-engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from pdctl.engines.channel import Assignment, Failed
from pdctl.errors import HandoffError
from pdctl.handoff.apart.plane import ApartCommon
from pdctl.handoff.apart.receiving import ApartReceiver
from pdctl.handoff.apart.sending import ApartSender
from pdctl.handoff.arena import Bytes
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.device import DeviceMaker
from pdctl.handoff.ending import OnFailed
from pdctl.handoff.identity import Identity
from pdctl.handoff.opening import Opening, open_receiver, open_sender
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.seam import ReceivingEnd, SendingEnd
from pdctl.handoff.store.client import StoreClient
from pdctl.topology.model import Role

log = logging.getLogger("pdctl.engines")


class Ends(NamedTuple):
    """A prefill replica sends, a decode replica receives, an ordinary one does neither. Whoever
    opened them closes them."""

    sender: SendingEnd | None = None
    receiver: ReceivingEnd | None = None

    def listen(self) -> int | None:
        """The data port that now listens; None where this role does not send.

        Raises:
            PeerLost: it can't be listened on, or a data plane of its own did not start.
            UsageError: the environment asks for a pacing that can't be.
        """
        if self.receiver is not None:
            self.receiver.start()
        return self.sender.start() if self.sender is not None else None

    def close(self) -> None:
        """Bounded."""
        close_each(end.close for end in self if end is not None)


def open_store(
    assigned: Assignment, board: CounterBoard, lock: Callable[[Bytes], None] | None = None
) -> StoreClient | None:
    """A client of the host's page store; None where this replica shares none. It dials by
    itself: until that store is there, every prompt is a miss.

    Args:
        lock: as `StoreClient` takes it.
    """
    if assigned.store is None:
        return None
    return StoreClient(assigned.store, contract=assigned.contract, board=board, lock=lock)


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
    device: DeviceMaker | None = None,
) -> Ends:
    """Opens this role's end in this process, unless its engine's own handoff is that; a sender
    is not started yet.

    Args:
        tell: gets every failed handoff, from the handoff's own threads.
        memory: makes what pages are sent from and pieces received into; None: ordinary memory.
        device: makes memory of the engine's device, where the assignment has pages lie there.

    Raises:
        UsageError: the environment asks for a pacing that can't be.
        HandoffError: pages are to be read through NIXL, which does not work here.
        MemoryError: there is not enough.
    """
    opening = opening_of(assigned)
    if opening is None:
        return Ends()
    on_failed = _reporting(assigned.role, tell)
    given = (opening, environment, board, on_failed)
    if opening.sends:
        return Ends(sender=open_sender(*given, memory=memory, device=device))
    return Ends(receiver=open_receiver(*given, memory=memory, device=device))


def open_ends_apart(
    assigned: Assignment,
    board: CounterBoard,
    tell: Callable[[Failed], None],
    lock: Callable[[Bytes], None] | None,
    on_lost: Callable[[HandoffError], None],
) -> Ends:
    """As `open_ends`, in a process beside this one, whose interpreter an engine keeps busy. What
    `open_ends` raises, `Ends.listen` does.

    Args:
        lock: makes memory what `open_ends`' `memory` makes; None: any will do.
        on_lost: told when that process has died; every open handoff has failed by then.

    Raises:
        MemoryError: `lock` can't.
    """
    opening = opening_of(assigned)
    if opening is None:
        return Ends()
    common: ApartCommon = {
        "lock": lock,
        "board": board,
        "on_failed": _reporting(assigned.role, tell),
        "on_lost": on_lost,
    }
    if opening.sends:
        return Ends(sender=ApartSender(opening, **common))
    return Ends(receiver=ApartReceiver(opening, **common))


def opening_of(assigned: Assignment) -> Opening | None:
    """None for an ordinary replica, and for one whose engine has a handoff of its own."""
    if assigned.native or assigned.role is Role.BOTH:
        return None
    return Opening(
        identity=Identity(assigned.replica, assigned.key, assigned.contract.digest),
        geometry=PageGeometry.of(assigned.contract),
        sends=assigned.role is Role.PREFILL,
        timeout_s=assigned.handoff.timeout_s,
        host=assigned.data_host,
        port=assigned.data_port or 0,
        buffer_bytes=assigned.handoff.buffer_bytes,
        certificate=assigned.certificate,
        transports=assigned.transports,
        on_device=assigned.device_pages,
    )


def _reporting(role: Role, tell: Callable[[Failed], None]) -> OnFailed:
    leg = role.value

    def failed(room: int, cause: str, detail: str) -> None:
        log.warning("room=%s leg=%s failed: %s: %s", room, leg, cause, detail)
        tell(Failed(room=room, leg=leg, cause=cause, detail=detail))

    return failed
