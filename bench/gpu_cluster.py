"""A cluster of vLLM and MLX in both roles, launched as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_engines import Engines, free_port

from pdctl.runtime.bench.target import Target, running

PDCTL = [sys.executable, "-c", "from pdctl.cli.app import main; main()"]
PACED = "vq"
PACED_BYTES_PER_S = 117_000_000
"""A saturated gigabit link."""
UP_S = 420


def topology(name: str, engines: Engines, direct_port: int, *, paced: bool) -> str:
    """Both engines in both roles; one more prefill replica, paced, where that is asked for."""
    head = f"""schema = 1
name = "{name}"
[model]
name = "{engines.model.name}"
dtype = "float16"
context_length = {engines.context_length}
[handoff]
buffer_bytes = "1GiB"
timeout_s = 120.0
[router]
bind = "127.0.0.1:{free_port()}"
[hosts.local]
"""
    pacing = {"PDCTL_PACING_BYTES_PER_S": str(PACED_BYTES_PER_S)}
    replicas = [
        _replica(engines, "vp", "vllm", "prefill", f"http_port = {direct_port}\n"),
        _replica(engines, "vd", "vllm", "decode"),
        _replica(engines, "mp", "mlx", "prefill"),
        _replica(engines, "md", "mlx", "decode"),
    ]
    if paced:
        replicas.append(_replica(engines, PACED, "vllm", "prefill", env=pacing))
    return head + "".join(replicas)


def _replica(
    engines: Engines,
    name: str,
    engine: str,
    role: str,
    more: str = "",
    env: dict[str, str] | None = None,
) -> str:
    is_vllm = engine == "vllm"
    python = engines.vllm_python if is_vllm else engines.mlx_python
    own = engines.vllm_env if is_vllm else engines.mlx_env
    options = engines.vllm_options if is_vllm else {}
    return f"""[[replicas]]
name = "{name}"
engine = "{engine}"
role = "{role}"
model = "{engines.model}"
python = "{python}"
compute_dtype = "{engines.compute_dtype}"
env = {_table({**own, **(env or {})})}
engine_config = {_table(options)}
{more}"""


def _table(values: dict[str, Any]) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + " }"


@contextmanager
def cluster(name: str, text: str, folder: Path) -> Iterator[Target]:
    """A running cluster of that topology; its logs are kept in `folder`."""
    path = folder / f"{name}.toml"
    path.write_text(text)
    state = Path(os.environ["XDG_STATE_HOME"]) / "pdctl" / name / "logs"
    try:
        subprocess.run(
            [*PDCTL, "up", str(path), "--detach", "--wait-timeout", str(UP_S)], check=True
        )
        yield running(str(path))
    finally:
        for log in state.glob("*.log"):
            (folder / f"{name}-{log.name}").write_bytes(log.read_bytes())
        subprocess.run([*PDCTL, "down", str(path)], check=False)
