"""SGLang's radix tree and its blocks, as far as prefix pages move in and out of them.

All calls are the scheduler thread's. Lengths are in tokens, whole pages of them. The names are
those of 0.5.21 to 0.5.23.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from pdctl.engines.sglang.pool import SlotPool
from pdctl.topology.model import PAGE_TOKENS


class Held(NamedTuple):
    """What the tree has of a prompt."""

    slots: torch.Tensor
    """One per token, whole blocks of them."""
    node: Any

    @property
    def pages(self) -> int:
        return len(self.slots) // PAGE_TOKENS

    @property
    def blocks(self) -> list[int]:
        return _blocks_of(self.slots)


class Lock(NamedTuple):
    node: Any
    receipt: Any


class Taken(NamedTuple):
    """Free blocks, a request's to be."""

    slots: torch.Tensor
    blocks: list[int]


class Tree:
    def __init__(self, scheduler: Any, pool: SlotPool) -> None:
        self._scheduler, self._pool = scheduler, pool
        self._cache = scheduler.tree_cache
        self._allocator = scheduler.token_to_kv_pool_allocator

    def held(self, req: Any, pages: int) -> Held:
        """The longest prefix of the prompt's first pages that lies in blocks."""
        found = self._cache.match_prefix(MatchPrefixParams(key=_key(req, pages)))
        slots = getattr(found, "device_indices", None)
        if slots is None:
            slots = self._cache.path_device_indices(found.last_device_node)
        return Held(slots, found.last_device_node)

    def lock(self, held: Held) -> Lock:
        """Those blocks stay as they are until `unlock`."""
        return Lock(held.node, self._cache.inc_lock_ref(held.node).to_dec_params())

    def unlock(self, lock: Lock) -> None:
        self._cache.dec_lock_ref(lock.node, lock.receipt)

    def take(self, pages: int) -> Taken | None:
        """Free blocks, the tree's least wanted ones where there are no others; None where
        running requests hold too many."""
        tokens = pages * PAGE_TOKENS
        evict_from_tree_cache(self._cache, tokens)
        if self._allocator.available_size() < tokens:
            return None
        slots = self._allocator.alloc(tokens)
        if slots is None:
            return None
        self._pool.fence()
        return Taken(slots, _blocks_of(slots))

    def tail_block(self, req: Any, tokens: int) -> int | None:
        """The block of the prompt's last, partial page, which is the request's own; None where
        it has none."""
        row = req.kv.req_pool_idx
        if tokens % PAGE_TOKENS == 0 or row is None:
            return None
        return int(self._scheduler.req_to_token_pool.req_to_token[row, tokens - 1]) // PAGE_TOKENS

    def give_back(self, taken: Taken) -> None:
        self._allocator.free(taken.slots)

    def insert(self, req: Any, held: Held, taken: Taken) -> None:
        """The prompt's pages after those held lie in these blocks, which are the tree's from now
        on: it frees those whose page somebody else has inserted meanwhile."""
        value = torch.cat([held.slots.to(torch.int64), taken.slots.to(torch.int64)])
        params = InsertParams(
            key=_key(req, len(value) // PAGE_TOKENS),
            value=value,
            prev_prefix_len=len(held.slots),
            priority=req.priority or 0,
        )
        self._cache.insert(params)


def _key(req: Any, pages: int) -> RadixKey:
    tokens = req.origin_input_ids[: pages * PAGE_TOKENS]
    return RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)


def _blocks_of(slots: torch.Tensor) -> list[int]:
    """The block of each page."""
    found: list[int] = (slots[::PAGE_TOKENS] // PAGE_TOKENS).tolist()
    return found
