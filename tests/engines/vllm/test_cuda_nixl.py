"""Pages read through NIXL out of another process's device, into this one's.

On a CPU its memory stands for a device's; with a GPU the same runs between devices, the first and
the last of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from engines.device_ends import opening  # noqa: E402
from handoff.ends import WAIT_S  # noqa: E402
from handoff.test_nixl import GEOMETRY, LONG, SenderProcess, check_received, fetched  # noqa: E402

from pdctl.engines.device import TorchDevice, tensor_of  # noqa: E402
from pdctl.errors import HandoffError, PeerLost  # noqa: E402
from pdctl.handoff.counters import CounterBoard  # noqa: E402
from pdctl.handoff.device import MemoryKind  # noqa: E402
from pdctl.handoff.opening import open_receiver  # noqa: E402
from pdctl.handoff.page import PATTERN  # noqa: E402
from pdctl.handoff.receiver import Receiver  # noqa: E402
from pdctl.handoff.sink import Piece, Want  # noqa: E402
from pdctl.handoff.slots import DEVICE_SLOTS  # noqa: E402
from pdctl.handoff.transport.nixl import NixlReach, installed  # noqa: E402

pytestmark = pytest.mark.skipif(installed() is None, reason="needs nixl in this environment")

SENDER = Path(__file__).parents[1] / "device_sender.py"
DEVICES = [
    pytest.param(("cpu", "cpu"), id="cpu", marks=pytest.mark.slow),
    pytest.param(
        ("cuda:0", f"cuda:{max(0, torch.cuda.device_count() - 1)}"),
        id="cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ],
    ),
]


class Collecting:
    """A `DeviceSink` that brings what came to the host."""

    def __init__(self) -> None:
        self.inside, self.proceed = threading.Event(), threading.Event()
        self.proceed.set()
        self.committed = False

    def offered(self, tokens: int, deadline: float) -> Want:
        self.pages = GEOMETRY.empty(tokens)
        return Want(tokens=tokens, first_token=True)

    def write_from(self, pieces: Sequence[Piece]) -> Callable[[], bool]:
        self.inside.set()
        assert self.proceed.wait(WAIT_S)
        for piece in pieces:
            shape = (piece.pages, piece.layers, *GEOMETRY.shape[1:])
            found = tensor_of(piece.at, torch.int16, shape).cpu().numpy().view(PATTERN)
            last = piece.first_layer + piece.layers
            pages = slice(piece.page, piece.page + piece.pages)
            self.pages[pages, piece.first_layer : last] = found
        return lambda: True

    def commit(self, first_token: int | None) -> None:
        self.committed = first_token == 7

    def abort(self, error: HandoffError) -> None:
        self.error = error


@pytest.fixture(params=DEVICES)
def devices(request: pytest.FixtureRequest) -> tuple[str, str]:
    chosen: tuple[str, str] = request.param
    return chosen


@pytest.fixture
def receiver(devices: tuple[str, str]) -> Iterator[Receiver]:
    made = open_receiver(
        opening(sends=False),
        os.environ,
        CounterBoard(),
        lambda room, cause, detail: None,
        device=TorchDevice(torch.device(devices[1])),
    )
    yield made
    made.close()


def check_whole(receiver: Receiver, sender: SenderProcess, tokens: int) -> None:
    sink = Collecting()
    check_received(receiver, sender, tokens, sink)
    assert sink.committed
    slots = receiver._device_slots
    assert slots is not None
    slots.look_again()
    assert slots.free == DEVICE_SLOTS


def test_pages_of_another_process_land_bit_by_bit(
    devices: tuple[str, str], receiver: Receiver
) -> None:
    """R25: at every length; counted as the device's, and none as the host's."""
    lengths = (1, 51, 65, 129, 193, 700, LONG)
    sender = SenderProcess(devices[0], *lengths, script=SENDER)
    try:
        for tokens in lengths:
            check_whole(receiver, sender, tokens)
        counters = receiver._board.read()
        pages = sum(GEOMETRY.pages_for(tokens) for tokens in lengths)
        assert counters.gpu_bytes == pages * GEOMETRY.page_bytes
        assert counters.host_bytes == 0
    finally:
        sender.close()


def test_a_sender_that_dies_is_lost_and_the_one_after_it_is_read(
    devices: tuple[str, str], receiver: Receiver
) -> None:
    """R61, U14: killed while its pages are read; another process takes its place, and its card."""
    sender = SenderProcess(devices[0], LONG, script=SENDER)
    sink = Collecting()
    sink.proceed.clear()
    inbound = fetched(receiver, sender, LONG, sink)
    assert sink.inside.wait(WAIT_S)
    sender.close()
    sink.proceed.set()
    assert inbound.settled.wait(WAIT_S)
    assert isinstance(inbound.error, PeerLost)
    assert not sink.committed
    again = SenderProcess(devices[0], LONG, script=SENDER)
    try:
        check_whole(receiver, again, LONG)
    finally:
        again.close()


def test_memories_of_two_kinds_do_not_meet() -> None:
    """Where one end keeps pages on a device and the other does not, both are named."""
    reach = NixlReach("d0", one_host=True)
    try:
        card = reach.card().replace(MemoryKind.HOST.encode(), MemoryKind.DEVICE.encode(), 1)
        with pytest.raises(HandoffError, match=r"in a device's memory, this replica reads host"):
            reach.meet(("127.0.0.1", 1), card)
    finally:
        reach.close()
