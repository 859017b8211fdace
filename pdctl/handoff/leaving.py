"""A prompt's pieces on their way out of a sender, over one connection."""

from __future__ import annotations

from collections.abc import Sequence

from pdctl.handoff import wire
from pdctl.handoff.device import Run
from pdctl.handoff.link import Link
from pdctl.handoff.outbound import Outbound
from pdctl.handoff.schedule import PagePart


def send_part(link: Link, outbound: Outbound, part: PagePart, *, reads: bool) -> None:
    """Sends it, or says where it lies; in a device's memory, with all that can be read by now.
    Raises PeerLost.

    Args:
        reads: the receiver takes pieces out of the pages itself.
    """
    if outbound.on_device:
        _spread(link, outbound, [part, *outbound.more_parts(wire.MAX_SPREAD - 1)])
        return
    piece = outbound.part_bytes(part)
    assert isinstance(piece, memoryview)
    send = link.send_placed if reads else link.send_piece
    send(outbound.room, part.page, part.first_layer, piece)
    outbound.sent_bytes += piece.nbytes


def _spread(link: Link, outbound: Outbound, parts: Sequence[PagePart]) -> None:
    runs = [run for part in parts if isinstance(run := outbound.part_bytes(part), Run)]
    spots = tuple(
        wire.Spot(part.page, part.first_layer, part.layers, run.address, part.pages)
        for part, run in zip(parts, runs, strict=True)
    )
    link.send_spread(outbound.room, runs[0].memory.index, spots)
    layers = sum(part.pages * part.layers for part in parts)
    outbound.sent_bytes += layers * link.geometry.layer_bytes
