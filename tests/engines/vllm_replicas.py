"""Real vLLM server processes on this machine's CPU, attached to a stand-in for the agent."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from engines.replicas import Process
from ports import free_port

from pdctl.engines.interface import Command
from pdctl.engines.vllm.spec import VllmSpec
from pdctl.topology.contract import Contract
from pdctl.topology.model import ComputeDtype, Dtype, Engine, Host, OnFailure, Replica, Role
from pdctl.topology.plan import Plan, ReplicaPlan
from pdctl.topology.sharing import StorePlan

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("PDCTL_TEST_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))

needs_vllm = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no vLLM environment at {PYTHON} (make venv-vllm)"
)

READY_S = 180.0
"""47 s alone on an idle machine; several share two cores here."""

MODEL_NAME = "tiny"
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "block_size": 64,
    "kv_cache_memory_bytes": 128 << 20,
    "max_num_seqs": 8,
}

_core = itertools.cycle(range(os.cpu_count() or 1))


class VllmProcess(Process):
    """As `Process`, but started by `launch`, so that several start at once; ready after
    `await_ready`. One core each: two OpenMP teams on one core stand still."""

    spec = VllmSpec()
    ready_s = READY_S

    def __init__(
        self,
        folder: Path,
        name: str,
        role: Role,
        model_dir: Path,
        contract: Contract,
        *,
        compute: ComputeDtype = ComputeDtype.FLOAT32,
        env: dict[str, str] | None = None,
        on_failure: OnFailure = OnFailure.ERROR,
        buffer_bytes: int = 512 << 20,
        timeout_s: float = 60.0,
        store: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            *(folder, name, role, model_dir, contract),
            compute=compute,
            on_failure=on_failure,
            buffer_bytes=buffer_bytes,
            timeout_s=timeout_s,
            store=store,
            env=env,
        )
        self._store = store
        self._port = free_port()
        self._on_failure = on_failure
        self._plan = ReplicaPlan(
            name=name,
            host="local",
            engine=Engine.VLLM,
            role=role,
            model=str(model_dir),
            dtype=Dtype.FLOAT16,
            compute_dtype=compute,
            http_port=self._port,
            declared=Replica(
                name=name,
                engine=Engine.VLLM,
                role=role,
                model=str(model_dir),
                python=str(PYTHON),
                engine_config={**OPTIONS, **options},
            ),
        )

    @property
    def http_port(self) -> int:
        return self._port

    def command(self) -> Command:
        return self.spec.command(self._plan, Host(name="local"), self._cluster())

    def launch(self) -> None:
        command = self.command()
        env = {
            **os.environ,
            **command.env,
            "VLLM_CPU_OMP_THREADS_BIND": str(next(_core)),
            "PDCTL_SOCKET": str(self.agent.path),
            "PDCTL_REPLICA": self.name,
            **self._env,
        }
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command.argv, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self) -> VllmProcess:
        self.launch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _signal(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _signal(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
            self.agent.go_away()

    def _cluster(self) -> Plan:
        return Plan(
            cluster="test",
            model=MODEL_NAME,
            dtype=Dtype.FLOAT16,
            context_length=self.contract.positions.context_length,
            contract_digest=self.contract.digest,
            token_kv_bytes=None,
            page_bytes=None,
            buffer_bytes=None,
            timeout_s=60.0,
            on_failure=self._on_failure,
            router_host="local",
            router_bind="127.0.0.1:0",
            agent_ports={},
            replicas=(self._plan,),
            pairs=(),
            stores=(StorePlan(host="local", buffer_bytes=0),) if self._store else (),
        )


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
