"""The engines that are measured, each started alike inside of a cluster and beside it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pdctl.engines.sglang.options import option_arguments as sglang_arguments
from pdctl.engines.vllm.options import option_arguments as vllm_arguments
from pdctl.topology.model import PAGE_TOKENS

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from ports import free_port  # noqa: E402

READY_S = 400.0
STOP_S = 20.0
SERVED = "m"
ENGINES = ("vllm", "sglang", "mlx")
BLAS = Path("/usr/lib/x86_64-linux-gnu/libopenblas.so.0")


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where engines are, and what each has of the machine: equal KV pools, equal batches."""

    model: Path
    logs: Path
    pythons: Mapping[str, str]
    """By engine: what runs its environment's Python."""
    device: str
    """"cuda"; to try a program where there is no GPU, "cpu", or "host", whose memory stands for a
    device's."""
    graphs: bool
    pool_tokens: int
    """Of KV cache, each vLLM and SGLang."""
    lanes: int
    """Requests that one engine computes at once."""
    context_length: int
    devices: tuple[int, ...] = (0,)
    """Prefill replicas are on the first one, decode replicas on the last."""
    after: int | None = None
    """A process whose end is waited for before anything is measured."""

    def devices_of(self, engine: str, *, last: bool = False) -> list[int]:
        """Of one replica; nothing where the engine can't be told, or has no GPU."""
        if self.device == "cpu" or engine == "mlx":
            return []
        return [self.devices[-1 if last else 0]]

    @property
    def compute_dtype(self) -> str:
        return "float16" if self.device == "cuda" else "float32"

    @property
    def page_bytes(self) -> int:
        """Of a canonical page."""
        return PAGE_TOKENS * self._token_values() * 2

    def options(self, engine: str) -> dict[str, Any]:
        """Of its server, by the names that a topology has for them."""
        given = {"vllm": self._vllm, "sglang": self._sglang, "mlx": dict}
        return dict(given[engine]())

    def environment(self, engine: str) -> dict[str, str]:
        if self.device == "cuda":
            # else a read through NIXL between two processes of one card goes over TCP
            return {} if engine == "mlx" else {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}
        stands = {"PDCTL_DEVICE": "host"} if self.device == "host" else {}
        if engine == "vllm":
            return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", **stands}
        if engine == "sglang":
            own = {k: v for k, v in _sglang_on_cpu().CPU_ENV.items() if k != "PDCTL_RUN"}
            return {**own, **stands}
        return {"LD_PRELOAD": str(BLAS), "OPENBLAS_NUM_THREADS": "1"} if BLAS.exists() else {}

    def _vllm(self) -> dict[str, Any]:
        width = 2 if self.compute_dtype == "float16" else 4
        return {
            "block_size": 64,
            "kv_cache_memory_bytes": self.pool_tokens * self._token_values() * width,
            "enforce_eager": not self.graphs,
            "max_num_seqs": self.lanes,
            # not what is used, which the line above says, but what must be free at start
            "gpu_memory_utilization": 0.02,
        }

    def _sglang(self) -> dict[str, Any]:
        pool = {"max_total_tokens": self.pool_tokens, "max_running_requests": self.lanes}
        if self.device != "cuda":
            return {**_sglang_on_cpu().OPTIONS, **pool}
        graphs = {"cuda_graph_max_bs_decode": self.lanes, "disable_prefill_cuda_graph": True}
        return {
            **pool,
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            # of what is free when it starts; the pool's size is said above
            "mem_fraction_static": 0.9,
            "disable_flashinfer_autotune": True,
            # an idle scheduler would take a core from what is measured
            "sleep_on_idle": True,
            "disaggregation_decode_retraction_backup": "cpu_tensor",
            **(graphs if self.graphs else {"disable_cuda_graph": True}),
        }

    def _token_values(self) -> int:
        config = json.loads((self.model / "config.json").read_text())
        head = config["hidden_size"] // config["num_attention_heads"]
        return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head)


def _sglang_on_cpu() -> Any:
    from engines import sglang_replicas

    return sglang_replicas


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

    def wait(self, until_s: float) -> None:
        """By time.monotonic(). Raises RuntimeError with the log's end where it does not come up."""
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > until_s:
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


def ordinary(site: Site, engine: str) -> Server:
    """Its own server, without any connector, under its name."""
    return {"vllm": vllm, "sglang": _sglang, "mlx": _mlx}[engine](site, engine)


def _chosen(site: Site, engine: str, *, last: bool = False) -> dict[str, str]:
    chosen = ",".join(map(str, site.devices_of(engine, last=last)))
    return {"CUDA_VISIBLE_DEVICES": chosen} if chosen else {}


def vllm(
    site: Site, name: str, arguments: tuple[str, ...] = (), env: Mapping[str, str] | None = None
) -> Server:
    port = free_port()
    argv = [
        *(site.pythons["vllm"], "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(site.model), "--served-model-name", SERVED),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", site.compute_dtype, "--max-model-len", str(site.context_length)),
        *arguments,
        *vllm_arguments(site.options("vllm")),
    ]
    own = {**_chosen(site, "vllm"), **site.environment("vllm"), **(env or {})}
    return Server(name, argv, port, site.logs / f"{name}.log", own, SERVED)


def vllm_nixl(site: Site) -> Iterator[Server]:
    """The two ends of vLLM's own handoff."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
    }
    for name in ("vnp", "vnd"):
        env = {
            **_chosen(site, "vllm", last=name == "vnd"),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        }
        yield vllm(site, name, ("--kv-transfer-config", json.dumps(transfer)), env)


def _sglang(site: Site, name: str) -> Server:
    port = free_port()
    argv = [
        *(site.pythons["sglang"], "-m", "sglang.launch_server"),
        *("--model-path", str(site.model), "--served-model-name", SERVED),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", site.compute_dtype, "--context-length", str(site.context_length)),
        *("--page-size", "64"),
        *sglang_arguments(site.options("sglang")),
    ]
    log = site.logs / f"{name}.log"
    env = {**_chosen(site, "sglang"), **site.environment("sglang")}
    return Server(name, argv, port, log, env, SERVED)


def _mlx(site: Site, name: str) -> Server:
    port = free_port()
    argv = [site.pythons["mlx"], "-m", "mlx_lm.server", "--model", str(site.model)]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    return Server(
        name, argv, port, site.logs / f"{name}.log", site.environment("mlx"), str(site.model)
    )
