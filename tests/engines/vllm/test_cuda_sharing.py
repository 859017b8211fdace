"""Pages between a page store and blocks on a GPU, whose copies run beside the model."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from engines.cuda_sides import Late
from engines.vllm.cuda_engine import PAGES, Engine
from engines.vllm.test_cuda_handoff import WAIT_S
from handoff.store.stores import CONTRACT

from pdctl.engines.cuda import filling
from pdctl.engines.exports import Exports
from pdctl.engines.vllm.sharing import Sharing
from pdctl.engines.vllm.steps import Seek
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.store.client import StoreClient
from pdctl.handoff.store.interface import StoreSeat
from pdctl.handoff.store.local import LocalServer
from pdctl.handoff.store.shelves import Shelves
from pdctl.topology.contract import Attention

TOKENS = 5 * 64 + 7
GIVEN, TAKEN = [4, 0, 3, 1, 5, 2], [2, 5, 0, 4, 1, 3]
"""Blocks of the prompt in the two engines."""
SEEK = Seek(request_id="r", token_ids=list(range(TOKENS)), salt="")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreClient]:
    contract = msgspec.structs.replace(
        CONTRACT,
        attention=Attention(
            kind="full", layers=PAGES.layers, kv_heads=PAGES.kv_heads, head_dim=PAGES.head_dim
        ),
    )
    shelves = Shelves(16 * PAGES.page_bytes, PAGES)
    server = LocalServer(str(tmp_path / "s"), shelves, contract.digest)
    server.start()
    client = StoreClient(
        StoreSeat(socket=str(tmp_path / "s")), contract=contract, board=CounterBoard()
    )
    assert client.settled(True, WAIT_S)
    yield client
    client.close()
    server.close()
    shelves.close()


class Replica:
    def __init__(self, store: StoreClient, engine: Engine) -> None:
        self.engine = engine
        self.found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.loaded: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sharing = Sharing(
            store,
            engine.blocks,
            PAGES,
            step_tokens=TOKENS,
            found=lambda *told: self.found.put(told),
            loaded=lambda *told: self.loaded.put(told),
        )
        self.sharer = self.sharing.seek(SEEK)

    def compute(self, blocks: list[int]) -> None:
        exports = Exports(self.engine.blocks, by_layer=False)
        saving = self.sharer.saving(blocks, TOKENS)
        assert saving is not None
        exports.begin([(saving, saving.span)])
        exports.finish()
        # what is under way lands first
        self.engine.blocks.close()

    def close(self) -> None:
        self.sharing.close()
        self.engine.blocks.close()


def test_a_prompt_leaves_one_engines_blocks_and_enters_anothers(
    store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R10: in both directions as late as a GPU copies, a page at a time."""
    monkeypatch.setattr(filling, "PART_BYTES", 1)
    giver = Replica(store, Engine(size=64, side=Late()))
    assert giver.found.get(timeout=WAIT_S) == ("r", 0)
    giver.compute(GIVEN)
    keys, deadline = store.prompt(SEEK.token_ids).stored(), time.monotonic() + WAIT_S
    while store.held(keys) < len(keys):
        assert time.monotonic() < deadline
    taker = Replica(store, Engine(size=64, side=Late()))
    for memory in taker.engine.caches.values():
        memory.zero_()
    assert taker.found.get(timeout=WAIT_S) == ("r", TOKENS - 1)
    taker.engine.blocks.fence()
    taker.sharer.place(TAKEN, 0, TAKEN)
    assert taker.loaded.get(timeout=WAIT_S) == ("r", ())
    for layer in range(PAGES.layers):
        given = giver.engine.tokens(layer, GIVEN)
        taken = taker.engine.tokens(layer, TAKEN)
        assert np.array_equal(taken[:, : TOKENS - 1], given[:, : TOKENS - 1])
        assert not taken[:, TOKENS - 1 :].any()
    for replica in (giver, taker):
        replica.close()
