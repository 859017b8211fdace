"""Either end of the data plane, opened from values that can be sent to another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from pdctl.handoff.arena import Bytes
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.device import DeviceMaker, MemoryKind
from pdctl.handoff.ending import Common, OnFailed
from pdctl.handoff.identity import Identity
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.receiver import Receiver
from pdctl.handoff.sender import Sender
from pdctl.handoff.sink import HELD_PIECES
from pdctl.handoff.transport.choice import chosen_reach, chosen_transport
from pdctl.handoff.transport.tls import Certificate
from pdctl.topology.model import Transport


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """Which end to be; it holds secrets."""

    identity: Identity
    geometry: PageGeometry
    sends: bool
    timeout_s: float
    host: str = "127.0.0.1"
    """Of the data plane. A sender listens there."""
    port: int = 0
    buffer_bytes: int = 0
    """A sender's, for the pages of all prompts that are reserved at a time."""
    certificate: Certificate | None = None
    transports: dict[str, Transport] = {}
    """Peer → how the pair's pages move."""
    on_device: bool = False
    """Those that are read lie in a device's memory."""

    def reads(self, peer: str) -> bool:
        """Whether the pair's pages are read, not sent."""
        return self.transports.get(peer) is Transport.NIXL


def open_sender(
    opening: Opening,
    environ: Mapping[str, str],
    board: CounterBoard,
    on_failed: OnFailed,
    *,
    memory: Callable[[int], Bytes] | None = None,
    device: DeviceMaker | None = None,
) -> Sender:
    """Not started yet; arguments as `Sender` says.

    Args:
        device: used where the opening says so.

    Raises:
        UsageError: the environment asks for a pacing that can't be.
        HandoffError: pages are to be read through NIXL, which does not work here.
        MemoryError: there is not as much.
    """
    device = device if opening.on_device else None
    if device is not None and set(opening.transports.values()) == {Transport.NIXL}:
        memory = None
    return Sender(
        opening.identity,
        opening.geometry,
        listen=(opening.host, opening.port),
        budget_bytes=opening.buffer_bytes,
        memory=memory,
        device=device,
        reads=opening.reads,
        **_common(opening, environ, board, on_failed, device),
    )


def open_receiver(
    opening: Opening,
    environ: Mapping[str, str],
    board: CounterBoard,
    on_failed: OnFailed,
    *,
    memory: Callable[[int], Bytes] | None = None,
    held_pieces: int = HELD_PIECES,
    device: DeviceMaker | None = None,
) -> Receiver:
    """Arguments as `Receiver` says. Raises as `open_sender` does."""
    device = device if opening.on_device else None
    return Receiver(
        opening.identity,
        opening.geometry,
        memory=memory,
        held_pieces=held_pieces,
        reads=opening.reads,
        device=device,
        **_common(opening, environ, board, on_failed, device),
    )


def _common(
    opening: Opening,
    environ: Mapping[str, str],
    board: CounterBoard,
    on_failed: OnFailed,
    device: DeviceMaker | None,
) -> Common:
    transport = chosen_transport(opening.certificate, environ)
    kind = MemoryKind.HOST if device is None else device.kind
    reach = chosen_reach(opening.identity.replica, opening.transports, opening.host, kind)
    return {
        "timeout_s": opening.timeout_s,
        "board": board,
        "on_failed": on_failed,
        "transport": transport,
        "reach": reach,
    }
