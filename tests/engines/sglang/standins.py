"""Stand-ins for SGLang's queue, radix tree and blocks, around a real `Sharing`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from handoff.store.stores import GEOMETRY, WAIT_S, Replica

from pdctl.engines.sglang.sharing import Sharing
from pdctl.handoff.page import Patterns

BLOCKS = 16
IDS = list(range(200))
"""Three pages and a tail of eight tokens."""


class Req:
    def __init__(self, ids: Sequence[int], salt: str | None = None) -> None:
        self.rid, self.origin_input_ids = "r", list(ids)
        self.cache_salt, self.extra_key = salt, None
        self.output_ids: list[int] = []
        self.sampling_params = SimpleNamespace(custom_params=None)


class Held(NamedTuple):
    blocks: list[int]

    @property
    def pages(self) -> int:
        return len(self.blocks)


class Tree:
    """Blocks by the tokens up to their end; `locks` are those taken and not given back."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[Any, ...], int] = {}
        self.free = list(range(BLOCKS))
        self.locks: list[Held] = []
        self.tails: dict[int, int] = {}

    def held(self, req: Req, pages: int) -> Held:
        found = []
        for stop in range(64, pages * 64 + 1, 64):
            block = self.blocks.get((req.cache_salt, *req.origin_input_ids[:stop]))
            if block is None:
                break
            found.append(block)
        return Held(found)

    def lock(self, held: Held) -> Held:
        self.locks.append(held)
        return held

    def unlock(self, lock: Held) -> None:
        self.locks.remove(lock)

    def take(self, pages: int) -> Any:
        if len(self.free) < pages:
            return None
        blocks, self.free = self.free[:pages], self.free[pages:]
        return SimpleNamespace(blocks=blocks)

    def give_back(self, taken: Any) -> None:
        self.free += taken.blocks

    def insert(self, req: Req, held: Held, taken: Any) -> None:
        for page, block in enumerate(taken.blocks, held.pages + 1):
            self.blocks[req.cache_salt, *req.origin_input_ids[: page * 64]] = block

    def tail_block(self, req: Req, tokens: int) -> int | None:
        return self.tails.get(id(req)) if tokens % 64 else None


class Pool:
    def __init__(self, seed: int) -> None:
        shape = (BLOCKS, *GEOMETRY.shape)
        self.cells = np.random.default_rng(seed).integers(1, 9999, shape).astype(np.uint16)
        self.flushed = 0
        self.breaks = False

    def flush(self) -> None:
        self.flushed += 1

    def read(self, blocks: Sequence[int], first: int, last_slots: int, into: Patterns) -> None:
        if self.breaks:
            raise RuntimeError("the device is gone")
        into[first : first + len(blocks)] = self.cells[list(blocks)]
        into[first + len(blocks) - 1, :, :, last_slots:] = 0

    def write(self, block: int, slots: range, first_layer: int, piece: Patterns) -> None:
        if self.breaks:
            raise RuntimeError("the device is gone")
        self.cells[block, :, :, slots.start : slots.stop] = piece[:, :, slots.start : slots.stop]

    def write_pages(self, blocks: Sequence[int], pages: Sequence[Patterns]) -> None:
        for block, page in zip(blocks, pages, strict=False):
            self.write(block, range(64), 0, page)
        self.flush()


class Side:
    """One replica's scheduler."""

    def __init__(self, replica: Replica, seed: int) -> None:
        self.client = replica
        self.tree, self.pool = Tree(), Pool(seed)
        self.scheduler = SimpleNamespace(waiting_queue=[])
        self.sharing = Sharing(
            self.scheduler,
            replica.store,
            self.pool,
            self.tree,
            GEOMETRY,  # type: ignore[arg-type]
        )

    def come(self, ids: Sequence[int] = IDS, salt: str | None = None) -> Req:
        req = Req(ids, salt)
        self.scheduler.waiting_queue.append(req)
        return req

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline
            self.sharing.look()

    def ready(self, req: Req) -> int:
        """Lets it through, and tells how many of its pages are in the tree by then."""
        self.until(lambda: req not in self.sharing.look())
        return self.tree.held(req, len(req.origin_input_ids) // 64).pages

    def compute(self, req: Req) -> None:
        """In one step; its result goes into the tree as SGLang does it."""
        self.scheduler.waiting_queue.remove(req)
        count = len(req.origin_input_ids)
        held = self.tree.held(req, count // 64)
        taken = self.tree.take(count // 64 - held.pages)
        self.tree.tails[id(req)] = BLOCKS - 1
        begun = self.sharing.begin([req])
        req.output_ids.append(1)
        self.tree.insert(req, held, taken)
        self.sharing.end(begun)

    def rest(self) -> None:
        self.until(lambda: self.sharing.moving == 0)

    def pages(self, req: Req) -> Patterns:
        return self.pool.cells[self.tree.held(req, len(req.origin_input_ids) // 64).blocks]

    def stored(self, pages: int) -> None:
        self.until(lambda: self.client.board.read().stored_pages >= pages)
