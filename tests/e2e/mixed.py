"""A cluster of vLLM and MLX replicas, launched as a user does."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
from e2e.cluster import ENGINE_PYTHON, Cluster, engine_env
from engine.faults import Faults
from engines.vllm_replicas import OPTIONS, PYTHON

ROLES = {"p": "prefill", "d": "decode", "o": "both"}
CONTEXT = 8192
BUFFER_TOKENS = CONTEXT - 128
"""What a prefill replica's buffer holds."""
BUFFER = f'buffer_bytes = "{BUFFER_TOKENS // 64 * 128}KiB"'


def mixed_text(
    name: str,
    model_dir: Path,
    replicas: str,
    *,
    bind: str,
    faults: Faults,
    model: str = "tiny",
    handoff: str = "",
    context_length: int = CONTEXT,
    dtype_of_vllm: str = "float32",
    **options: Any,
) -> str:
    """Replicas by name: its first letter is the engine's, its second the role's (`vp`, `md`)."""
    head = f"""
schema = 1
name = "{name}"
[model]
name = "{model}"
dtype = "float16"
context_length = {context_length}
[handoff]
timeout_s = 60.0
{handoff}
[router]
bind = "{bind}"
"""
    return head + "".join(
        replica_text(replica, model_dir, faults, dtype_of_vllm, core % 2, options)
        for core, replica in enumerate(replicas.split())
    )


def replica_text(
    name: str,
    model_dir: Path,
    faults: Faults,
    dtype_of_vllm: str = "float32",
    core: int = 0,
    options: dict[str, Any] | None = None,
) -> str:
    vllm = name[0] == "v"
    env = {**faults.environment, "VLLM_CPU_OMP_THREADS_BIND": str(core)} if vllm else engine_env()
    config = {**OPTIONS, **(options or {})} if vllm else {}
    return f"""
[[replicas]]
name = "{name}"
engine = "{"vllm" if vllm else "mlx"}"
role = "{ROLES[name[1]]}"
model = "{model_dir}"
compute_dtype = "{dtype_of_vllm if vllm else "float32"}"
python = "{PYTHON if vllm else ENGINE_PYTHON}"
env = {{ {", ".join(f'{key} = "{value}"' for key, value in env.items())} }}
engine_config = {{ {", ".join(f"{key} = {str(value).lower()}" for key, value in config.items())} }}
"""


class Mixed(Cluster):
    """`vllm` gives the processes of a vLLM replica; leftovers are found by their state folder."""

    def __init__(self, folder: Path, model_dir: Path, replicas: str, **options: Any) -> None:
        super().__init__(folder, model_dir)
        self.model = options.get("model", "tiny")
        self.model_dir = model_dir
        self.faults = Faults(folder)
        self._replicas = replicas
        self._options = options
        self.write()

    def write(self, *more: str) -> None:
        """The file, with these MLX replicas besides."""
        text = mixed_text(
            *(self.name, self.model_dir, " ".join([self._replicas, *more])),
            bind=self.bind,
            faults=self.faults,
            **self._options,
        )
        self.topology.write_text(text)

    def processes(self, replica: str) -> list[psutil.Process]:
        """A replica's own process, and all that it started."""
        first = psutil.Process(self.replica(replica)["pid"])
        return [first, *first.children(recursive=True)]

    def computed_tokens(self, replica: str) -> float:
        """Prompt tokens that a vLLM replica has computed or found, by its own account."""
        record = json.loads((self.state / "pdctl" / self.name / "cluster.json").read_text())
        port = next(r["http_port"] for r in record["plan"]["replicas"] if r["name"] == replica)
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        lines = text.splitlines()
        found = next(line for line in lines if line.startswith("vllm:prompt_tokens_total"))
        return float(found.rsplit(" ", 1)[1])

    def kill_worker(self, replica: str) -> int:
        """SIGKILL to the process of a vLLM replica that owns its KV memory; the replica's pid."""
        pid = int(self.replica(replica)["pid"])
        worker = next(p for p in self.processes(replica) if "Worker" in " ".join(p.cmdline()))
        os.kill(worker.pid, signal.SIGKILL)
        return pid

    def leftovers(self) -> Iterator[str]:
        yield from super().leftovers()
        for process in psutil.process_iter(["pid", "name"]):
            if process.info["name"].startswith("VLLM::") and self._ours(process):
                yield f"{process.info['pid']} {process.info['name']}"

    def _ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("XDG_STATE_HOME") == str(self.state)
        except psutil.Error:
            return False
