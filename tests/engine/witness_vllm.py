"""pdctl's connector for vLLM, which also writes down what a request's blocks hold.

    [layers, blocks, kv_heads, block_tokens, 2 * head_dim]

as vLLM registered them: prefill's after each chunk, so that the last one stays, decode's after
the first forward on what was imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from engine import witness

from pdctl.engines.vllm.connector import PdctlConnector
from pdctl.engines.vllm.layout import in_order


class WitnessConnector(PdctlConnector):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._memory = [kv_caches[name] for name in in_order(kv_caches)]
        self._rooms: dict[str, int] = {}
        self._imported: dict[str, list[int]] = {}

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        super().start_load_kv(forward_context, **more)
        self._rooms |= {begin.request_id: begin.leg.room for begin in self._step.begin}
        self._imported |= {place.request_id: place.blocks for place in self._step.place}

    def wait_for_save(self) -> None:
        super().wait_for_save()
        for request_id in self._step.starts:
            self._write(request_id, self._imported[request_id])
        for export in self._step.export:
            self._write(export.request_id, export.blocks)

    def _write(self, request_id: str, blocks: Sequence[int]) -> None:
        if not witness.wanted():
            return
        held = torch.stack([memory[list(blocks)] for memory in self._memory])
        witness.write(self._rooms[request_id], held.numpy())
