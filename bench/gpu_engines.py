"""The engines that are measured beside a cluster: without pdctl, and with vLLM's own handoff."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from pdctl.engines.vllm.options import option_arguments

READY_S = 400.0
STOP_S = 20.0
SERVED = "m"


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


class Server:
    """One engine's own server, on loopback; starts at once, is ended with the block."""

    def __init__(
        self, name: str, argv: list[str], port: int, log: Path, env: Mapping[str, str], model: str
    ) -> None:
        self.name, self.port, self.model = name, port, model
        self.url = f"http://127.0.0.1:{port}"
        self._argv, self._log, self._env = argv, log, env

    def __enter__(self) -> Server:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._argv,
                env={**os.environ, **self._env},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(STOP_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    def wait(self) -> None:
        """Raises RuntimeError with the log's end where it does not come up."""
        until = time.monotonic() + READY_S
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > until:
                said = self._log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{self.name} did not come up:\n{said}")
            time.sleep(0.2)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


class Engines:
    """How engines are started on one machine, alike in and beside a cluster."""

    def __init__(
        self,
        model: Path,
        logs: Path,
        *,
        vllm_python: str,
        mlx_python: str,
        vllm_options: dict[str, Any],
        vllm_env: Mapping[str, str],
        mlx_env: Mapping[str, str],
        compute_dtype: str,
        context_length: int,
    ) -> None:
        self.model, self.logs = model, logs
        self.vllm_python, self.mlx_python = vllm_python, mlx_python
        self.vllm_options = vllm_options
        self.vllm_env, self.mlx_env = vllm_env, mlx_env
        self.compute_dtype, self.context_length = compute_dtype, context_length

    def vllm(self, name: str, options: Mapping[str, Any] | None = None) -> Server:
        """An ordinary vLLM: no connector of any kind."""
        return self._vllm(name, [], {}, {**self.vllm_options, **(options or {})})

    def vllm_nixl(self, name: str) -> Server:
        """One end of vLLM's own handoff."""
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "fail",
        }
        env = {
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        }
        arguments = ["--kv-transfer-config", json.dumps(transfer)]
        return self._vllm(name, arguments, env, self.vllm_options)

    def mlx(self, name: str) -> Server:
        """mlx-lm's own server."""
        port = free_port()
        argv = [self.mlx_python, "-m", "mlx_lm.server", "--model", str(self.model)]
        argv += ["--host", "127.0.0.1", "--port", str(port)]
        log = self.logs / f"{name}.log"
        return Server(name, argv, port, log, self.mlx_env, str(self.model))

    def _vllm(
        self, name: str, arguments: list[str], env: Mapping[str, str], options: Mapping[str, Any]
    ) -> Server:
        port = free_port()
        argv = [
            *(self.vllm_python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", SERVED),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", self.compute_dtype, "--max-model-len", str(self.context_length)),
            *arguments,
            *option_arguments(options),
        ]
        log = self.logs / f"{name}.log"
        return Server(name, argv, port, log, {**self.vllm_env, **env}, SERVED)
