"""vLLM on a CPU with its worker in its scheduler's process, as it has it with one GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def patch(module: ModuleType) -> None:
    platform = module.CpuPlatform
    configured = platform.check_and_update_config

    def in_one_process(vllm_config: Any) -> None:
        configured(vllm_config)
        vllm_config.parallel_config.distributed_executor_backend = "uni"

    platform.check_and_update_config = staticmethod(in_one_process)
