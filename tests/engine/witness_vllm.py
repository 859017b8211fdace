"""Around pdctl's connector in vLLM, which also writes down what a request's blocks hold.

    [layers, blocks, kv_heads, block_tokens, 2 * head_dim]

as vLLM registered them: prefill's after each chunk, so that the last one stays, decode's after
the first forward on what was imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from engine import witness

from pdctl.engines.vllm.layout import in_order


def patch(module: ModuleType) -> None:
    connector = module.PdctlConnector
    register, bind, wait = (
        getattr(connector, name)
        for name in ("register_kv_caches", "bind_connector_metadata", "wait_for_save")
    )

    def registered(self: Any, kv_caches: dict[str, torch.Tensor]) -> None:
        register(self, kv_caches)
        self._seen = Seen([kv_caches[name] for name in in_order(kv_caches)])
        begin = self._worker.begin

        def begun(order: Any) -> None:
            self._seen.begun(order)
            begin(order)

        self._worker.begin = begun

    def bound(self: Any, metadata: Any) -> None:
        bind(self, metadata)
        if self._worker is not None:
            self._seen.placed(self._step)

    def waited(self: Any) -> None:
        wait(self)
        if self._worker is not None:
            self._seen.computed(self._step)

    connector.register_kv_caches = registered
    connector.bind_connector_metadata = bound
    connector.wait_for_save = waited


class Seen:
    """One worker's memory, and which request has which room and blocks."""

    def __init__(self, memory: Sequence[torch.Tensor]) -> None:
        self._memory = memory
        self._rooms: dict[str, int] = {}
        self._imported: dict[str, list[int]] = {}

    def begun(self, order: Any) -> None:
        self._rooms[order.request_id] = order.leg.room

    def placed(self, step: Any) -> None:
        self._imported |= {place.request_id: place.blocks for place in step.place}

    def computed(self, step: Any) -> None:
        for request_id in step.starts:
            self._write(request_id, self._imported[request_id])
        for export in step.export:
            self._write(export.request_id, export.blocks)

    def _write(self, request_id: str, blocks: Sequence[int]) -> None:
        if witness.wanted():
            held = torch.stack([memory[list(blocks)] for memory in self._memory])
            witness.write(self._rooms[request_id], held.cpu().numpy())
