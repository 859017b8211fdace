"""vLLM's own NixlConnector, as a replica of a cluster (`transport = "native"`).

It is vLLM's in everything that moves the KV cache. A subclass, not a second connector beside it
(`MultiConnector`): one object sees vLLM's calls in vLLM's order, and what is added neither
answers a question of the scheduler's nor holds a block. Added is: the agent is told what was
loaded, and is asked first; requests and handoffs are counted; and the scheduler hears of no
reading that it does not wait for. Blocks that decode was told of and will not read, vLLM lets go
by itself; blocks that decode never heard of, when their lease of 30 s runs out. Between CPUs its
NIXL rests while nothing moves, which it does not by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
from importlib import import_module
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

from pdctl.engines.vllm.effective import loaded
from pdctl.engines.vllm.native_half import NativeHalf, NativeStep
from pdctl.engines.vllm.session import Session
from pdctl.handoff.counters import OF_A_HANDOFF, OF_PAGES
from pdctl.handoff.transport.progress import resting
from pdctl.topology.model import Role


class NativeConnector(NixlConnector):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        on_host = transfer.kv_buffer_device == "cpu"
        with resting(import_module("nixl")) if on_host else contextlib.nullcontext():
            super().__init__(vllm_config, role, kv_cache_config)
        logging.getLogger("pdctl").setLevel(logging.INFO)
        self._half: NativeHalf | None = None
        self._session: Session | None = None
        if role is KVConnectorRole.SCHEDULER:
            moved = "host_bytes" if on_host else "gpu_bytes"
            self._half = NativeHalf(_block_bytes(kv_cache_config), moved)
        else:
            http_port = int(transfer.get_from_extra_config("http_port", 0))
            self._session = Session(os.environ, http_port)

    # -- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        session = self._session
        assert session is not None
        sends = session.attach().role is Role.PREFILL
        session.board.untell(OF_A_HANDOFF if sends else OF_PAGES)
        super().register_kv_caches(kv_caches)
        block_tokens = self._vllm_config.cache_config.block_size
        session.open(loaded(self._vllm_config, len(kv_caches), block_tokens))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The one call that every version makes in every step."""
        super().bind_connector_metadata(connector_metadata)
        step = getattr(connector_metadata, "pdctl", None)
        if self._session is not None and isinstance(step, NativeStep):
            self._session.count(step.load)
            for counted in step.counted:
                self._session.board.add(peer=counted.peer, **counted.amounts)
            for failed in step.failed:
                self._session.board.failure(failed.cause)
                self._session.report(failed)

    def shutdown(self) -> None:
        try:
            super().shutdown()
        finally:
            if self._session is not None:
                self._session.close()

    # -- scheduler

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        if self._half is not None:
            self._half.arrived(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._half is not None and num_external_tokens:
            filled = blocks.get_unhashed_block_ids_all_groups()[0]
            self._half.placed(request, len(filled), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        made = super().build_connector_meta(scheduler_output)
        if self._half is not None:
            made.pdctl = self._half.step(scheduler_output)
        return made

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        if self._half is not None:
            received = connector_output.finished_recving
            if received:
                connector_output.finished_recving = self._half.received(received)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._half is not None:
            self._half.finished(request)
        return super().request_finished(request, block_ids)  # type: ignore[no-any-return]

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._half is not None:
            self._half.finished(request)
        return super().request_finished_all_groups(request, block_ids)  # type: ignore[no-any-return]


def _block_bytes(kv_cache_config: Any) -> int:
    groups = kv_cache_config.kv_cache_groups
    return sum(group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in groups)
