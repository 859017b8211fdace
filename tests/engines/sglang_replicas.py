"""Real SGLang server processes on this machine's CPU, attached to a stand-in for the agent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engines.vllm_replicas import MODEL_NAME, ROOT, VllmProcess

from pdctl.engines.sglang.spec import SglangSpec
from pdctl.topology.contract import Contract
from pdctl.topology.model import Engine, Role

__all__ = ["MODEL_NAME", "SglangProcess", "needs_sglang"]

PYTHON = Path(os.environ.get("PDCTL_TEST_SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))

needs_sglang = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no SGLang environment at {PYTHON} (make venv-sglang)"
)

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "disaggregation_decode_retraction_backup": "cpu_tensor",
    # its scheduler would take a whole core while nothing is asked of it
    "sleep_on_idle": True,
}

CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    "PDCTL_RUN": "test",
}
"""0.5.21 allocates blocks with Triton kernels, which have an interpreter for want of a GPU."""


class SglangProcess(VllmProcess):
    """Started by `launch`; ready after `await_ready`."""

    spec = SglangSpec()

    def __init__(
        self, folder: Path, name: str, role: Role, model_dir: Path, contract: Contract, **given: Any
    ) -> None:
        named = ("compute", "env", "on_failure", "buffer_bytes", "timeout_s", "store")
        kept = {key: given.pop(key) for key in named if key in given}
        env = {**CPU_ENV, **kept.pop("env", {})}
        super().__init__(folder, name, role, model_dir, contract, env=env, **kept)
        declared = msgspec.structs.replace(
            self._plan.declared,
            engine=Engine.SGLANG,
            python=str(PYTHON),
            engine_config={**OPTIONS, **given},
        )
        self._plan = msgspec.structs.replace(self._plan, engine=Engine.SGLANG, declared=declared)
