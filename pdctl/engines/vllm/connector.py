"""vLLM's KV connector (v1), loaded by module path: it hands each call to one of two halves.

vLLM makes one object in its scheduler's process and one in its worker's. What they tell each
other travels in vLLM's own metadata (`steps.py`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from pdctl.engines.vllm.blocks import open_blocks
from pdctl.engines.vllm.effective import loaded
from pdctl.engines.vllm.interface import Blocks
from pdctl.engines.vllm.line import join, line
from pdctl.engines.vllm.scheduling import SchedulerHalf
from pdctl.engines.vllm.session import Session
from pdctl.engines.vllm.steps import Notice, Step
from pdctl.engines.vllm.working import WorkerHalf
from pdctl.errors import LaunchError
from pdctl.handoff.page import PageGeometry
from pdctl.topology.model import Role

log = logging.getLogger("pdctl.engines.vllm")


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    step: Step = field(default_factory=Step)


@dataclass
class NoticeMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    notices: list[Notice] = field(default_factory=list)

    def aggregate(self, other: NoticeMetadata) -> NoticeMetadata:
        return NoticeMetadata(self.notices + other.notices)


class PdctlConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Thin: every method is one call. The halves are made where vLLM makes them usable.

    CUDA graphs stay as the user has them. vLLM's default replays a whole graph in steps that only
    decode, which a prompt with a leg meets at most with a chunk of one token; every other step
    calls `save_kv_layer`. What a whole graph has computed is copied after it (`Exports.finish`).
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        logging.getLogger("pdctl").setLevel(logging.INFO)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._blocks: Blocks | None = None
        self._session: Session | None = None
        self._notices: list[Notice] = []
        self._lost: set[int] = set()
        transfer = vllm_config.kv_transfer_config
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                Role(transfer.get_from_extra_config("role", "both")),
                vllm_config.cache_config.block_size,
                recomputes=transfer.kv_load_failure_policy == "recompute",
                shares=bool(transfer.get_from_extra_config("shares", False)),
                line=line,
            )
        else:
            http_port = int(transfer.get_from_extra_config("http_port", 0))
            self._session = Session(os.environ, http_port)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: pages are copied out of the blocks within the step that filled them."""
        return False

    # -- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        session, config = self._session, self._vllm_config
        assert session is not None
        assigned = session.attach()
        geometry = PageGeometry.of(assigned.contract)
        try:
            blocks = open_blocks(kv_caches, geometry, config)
        except ValueError as error:
            raise LaunchError(f"vLLM's KV memory can't be converted: {error}") from error
        self._blocks = blocks
        found = loaded(config, len(kv_caches), blocks.block_tokens)
        try:
            session.open(found, blocks.page_memory, blocks.lock, blocks.device)
        except MemoryError as error:
            hint = "lower handoff.buffer_bytes, or engine_config.gpu_memory_utilization"
            raise LaunchError(str(error), hint=hint) from error
        step_tokens = config.scheduler_config.max_num_batched_tokens
        self._worker = WorkerHalf(session, blocks, step_tokens=step_tokens)
        join(self._worker)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The one call that every version makes before the forward: 0.32.0 makes
        `start_load_kv` after it."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.obey(self._step)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        if self._worker is not None:
            self._worker.saved(layer_name)

    def wait_for_save(self) -> None:
        """vLLM also calls it while what the forward raised is on its way out."""
        if self._worker is not None:
            self._worker.forwarded(self._step, sys.exception())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        self._notices, loaded, self._lost = self._worker.collect()
        return None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        lost, self._lost = self._lost, set()
        return lost

    def build_connector_worker_meta(self) -> NoticeMetadata | None:
        notices, self._notices = self._notices, []
        return NoticeMetadata(notices) if notices else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._session is not None:
            self._session.close()
        if self._blocks is not None:
            self._blocks.close()

    @property
    def _step(self) -> Step:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.step

    # -- scheduler

    def on_new_request(self, request: Any) -> None:
        self._half.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._half.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._half.placed(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return StepMetadata(self._half.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, NoticeMetadata):
            self._half.told(metadata.notices)

    def request_finished(
        self, request: Any, block_ids: Iterable[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._half.finished(request)
        return False, None

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None
        return self._scheduler
