"""How long a received piece stays what it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from pdctl.handoff.link import Link
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.sink import HELD_PIECES
from pdctl.handoff.transport.memory import MemoryTransport

GEOMETRY = PageGeometry(layers=1, kv_heads=1, head_dim=4)


@pytest.mark.parametrize("made", [True, False])
def test_pieces_stay_in_memory_that_was_given(made: bool) -> None:
    """R10: a copy out of the last eight pieces may still be under way; in ordinary memory one is
    enough."""
    given: list[int] = []

    def memory(size: int) -> np.ndarray:
        given.append(size)
        return np.zeros(size, np.uint8)

    near, far = linked(memory if made else None)
    count = HELD_PIECES + 3
    pieces = [bytes([number]) * GEOMETRY.layer_bytes for number in range(count)]
    sending = threading.Thread(
        target=lambda: [far.send_piece(1, 0, 0, memoryview(piece)) for piece in pieces]
    )
    sending.start()
    read = [near.read_piece(near.read_header()) for _ in range(count)]
    sending.join()
    kept = HELD_PIECES if made else 1
    assert [bytes(piece) for piece in read[-kept:]] == pieces[-kept:]
    assert given == ([GEOMETRY.page_bytes] * HELD_PIECES if made else [])


def linked(memory: Callable[[int], np.ndarray] | None) -> tuple[Link, Link]:
    transport = MemoryTransport()
    listener = transport.listen(("127.0.0.1", 0))
    dialled = transport.dial(("127.0.0.1", listener.port), 5.0)
    accepted = listener.accept()
    assert accepted is not None
    near = Link(dialled, GEOMETRY, time.monotonic, memory)
    return near, Link(accepted, GEOMETRY, time.monotonic)
