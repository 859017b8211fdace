"""Both legs, over a real handoff and two pools in memory. For an environment that has SGLang."""

from __future__ import annotations

import atexit
import gc
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from handoff.ends import WAIT_S, Ends
from handoff.reaches import Read

from pdctl.engines.interface import Leg
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.store.interface import PageStore
from pdctl.handoff.transport.tcp import TcpTransport

torch: Any = pytest.importorskip("torch")
with warnings.catch_warnings():
    # of SGLang's own imports
    warnings.simplefilter("ignore")
    pytest.importorskip("sglang")
    from sglang.srt.disaggregation.utils import MetadataBuffers

    from pdctl.engines.device import TorchDevice
    from pdctl.engines.sglang.exchange import Exchange
    from pdctl.engines.sglang.pool import SlotPool
    from pdctl.engines.sglang.receiving import DecodeLeg
    from pdctl.engines.sglang.sending import PrefillLeg

from engines.cuda_sides import Late  # noqa: E402
from engines.sglang.cuda_pools import DEVICE, ON_GPU, row, slots_of  # noqa: E402

# a full collection of SGLang's modules may take longer than a handoff's ends stay silent
gc.freeze()
atexit.register(gc.unfreeze)

LAYERS, HEADS, DIM, BLOCKS, TOKEN = 2, 2, 8, 8, 41
GEOMETRY = PageGeometry(layers=LAYERS, kv_heads=HEADS, head_dim=DIM)


class Side:
    """One engine's memory and its exchange.

    Args:
        cuda: the pool is copied as on a GPU; without one, as late as one may copy.
    """

    def __init__(
        self, ends: Ends, seed: int, *, cuda: bool, store: PageStore | None = None
    ) -> None:
        torch.manual_seed(seed)
        device = DEVICE if cuda else torch.device("cpu")
        layers = [torch.randn(BLOCKS * 64, HEADS, DIM).half().to(device) for _ in range(2 * LAYERS)]
        self.keys, self.values = layers[:LAYERS], layers[LAYERS:]
        self.rows = MetadataBuffers(4, 16, torch.float32, 8)
        self.failed: list[Any] = []
        memory = SimpleNamespace(k_buffer=self.keys, v_buffer=self.values, page_size=64)
        session = SimpleNamespace(
            sender=ends.sender,
            receiver=ends.receiver,
            board=ends.sent,
            report=self.failed.append,
            replica="r0",
            store=store,
        )
        self.exchange = Exchange(None, None, None)
        scheduler = SimpleNamespace(disagg_metadata_buffers=self.rows)
        self.side = Late()
        self.table = torch.zeros(2, BLOCKS * 64, dtype=torch.int32, device=device)
        self.pool = SlotPool(memory, GEOMETRY)
        if cuda:
            # the ends' memory is used again at once
            self.pool = slots_of(memory, GEOMETRY, self.table, self.side, reaches=False)
        self.exchange.join(session, self.pool, scheduler)

    def give(self, request: int, blocks: list[int]) -> None:
        """A row of SGLang's table."""
        slots = row(*blocks)
        self.table[request, : len(slots)] = slots

    def tokens(self, blocks: list[int], count: int) -> Any:
        slots = torch.cat([torch.arange(64 * b, 64 * b + 64) for b in blocks])[:count]
        return torch.stack([layer.cpu()[slots] for layer in (*self.keys, *self.values)])


class Pair:
    """Args:
    device: pages and pieces lie in the device's memory, and are read from there.
    """

    def __init__(self, *, cuda: bool, device: bool, store: PageStore | None = None) -> None:
        if cuda and ON_GPU:
            pytest.skip("the order of copies is steered in the interpreter")
        transport = Read() if device else TcpTransport()
        maker = TorchDevice(torch.device("cpu")) if device else None
        self.ends = Ends(transport, GEOMETRY, device=maker, budget_bytes=1 << 20)
        self.p = Side(self.ends, 1, cuda=cuda)
        self.d = Side(self.ends, 2, cuda=cuda, store=store)

    def leg(self) -> Leg:
        found = self.ends.leg()
        return Leg(
            room=found.room,
            ticket=found.ticket,
            prefill="p0",
            decode="d0",
            sender=found.sender,
            timeout_s=30.0,
        )

    def begin(self, tokens: int, salt: str | None = None) -> tuple[PrefillLeg, DecodeLeg]:
        leg, ids = self.leg(), list(range(tokens))
        sending = PrefillLeg(self.p.exchange, "p0:1", leg.room, dest_tp_ranks=[0], pp_rank=0)
        receiving = DecodeLeg(self.d.exchange, "p0:1", leg.room)
        receiving.begin(leg, ids, salt)
        sending.begin(leg, ids)
        return sending, receiving

    def close(self) -> None:
        self.ends.close()
        for side in (self.p, self.d):
            side.pool.close()


def eventually(leg: PrefillLeg | DecodeLeg, state: int) -> None:
    until(lambda: leg.poll() == state)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)
