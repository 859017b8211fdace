"""Pieces over one connection, as the bench of the transfer sends them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from piece_copies import COPIES, Copies, Spot, listening

from pdctl.handoff.page import PageGeometry

GEOMETRY = PageGeometry(layers=4, kv_heads=2, head_dim=8)
SPOTS = [Spot(0, 0, 1), Spot(1, 0, 1), Spot(0, 1, 3), Spot(1, 1, 2), Spot(1, 3, 1)]
LIMIT_S = 10.0


@pytest.fixture
def ends() -> Iterator[tuple[Copies, Copies, socket.socket]]:
    """Both ends of one connection; and the sending one's socket."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listening())
        dialled = socket.create_connection(listener.getsockname()[:2])
        accepted, _ = listener.accept()
        sends, receives = Copies(accepted, GEOMETRY), Copies(dialled, GEOMETRY)
        for each in (sends, receives):
            stack.callback(each.close)
        yield sends, receives, accepted


@pytest.mark.parametrize("kind", COPIES)
def test_every_piece_arrives_and_the_sender_is_told(
    kind: str, ends: tuple[Copies, Copies, socket.socket]
) -> None:
    """`send` returns only when the other end has taken the last one."""
    sends, receives, _ = ends
    pages = np.arange(2 * GEOMETRY.page_bytes, dtype=np.uint64).astype(np.uint8)
    sending = threading.Thread(target=sends.send, args=(kind, SPOTS, pages))
    sending.start()
    receives.receive(kind, SPOTS)
    sending.join(LIMIT_S)
    assert not sending.is_alive()


def test_a_checksum_that_differs_is_seen(ends: tuple[Copies, Copies, socket.socket]) -> None:
    """Else nothing would say that the receiving end hashes at all."""
    _, receives, accepted = ends
    accepted.sendall(bytes(8 + GEOMETRY.layer_bytes))
    with pytest.raises(ValueError, match="corrupted"):
        receives.receive("hashed", SPOTS[:1])
