"""Around pdctl's two legs in SGLang, which also write down what a request's blocks hold.

    [layers, 2, slots, kv_heads, head_dim]

as SGLang's pool has them: prefill's when the prompt's last block is handed over, decode's when
the request is about to go on with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from engine import witness

BLOCK_TOKENS = 64


def patch(module: ModuleType) -> None:
    if module.__name__.endswith("sending"):
        _watch_prefill(module.PrefillLeg)
    else:
        _watch_decode(module.DecodeLeg)


def _watch_prefill(leg: Any) -> None:
    send = leg.send

    def sent(self: Any, kv_indices: Any, *rest: Any, **named: Any) -> None:
        self.seen = [*getattr(self, "seen", ()), *map(int, kv_indices)]
        if len(self.seen) >= self._blocks and witness.wanted():
            witness.write(self._room, held(self, self.seen))
        send(self, kv_indices, *rest, **named)

    leg.send = sent


def _watch_decode(leg: Any) -> None:
    observe = leg._observe

    def landed(self: Any, committed_at: float) -> None:
        if not self._observed and witness.wanted():
            witness.write(self._room, held(self, self.landing._blocks))
        observe(self, committed_at)

    leg._observe = landed


def held(leg: Any, blocks: Sequence[int]) -> Any:
    pool = leg.kv_mgr._scheduler.token_to_kv_pool_allocator.get_kvcache()
    slots = [block * BLOCK_TOKENS + at for block in blocks for at in range(BLOCK_TOKENS)]
    halves = [
        torch.stack([buffer[slots] for buffer in buffers])
        for buffers in (pool.k_buffer, pool.v_buffer)
    ]
    return torch.stack(halves, dim=1).cpu().numpy()
