"""A cluster of several engines' replicas, launched as a user does."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
from e2e.cluster import ENGINE_PYTHON, engine_env, head_text
from e2e.data_link import DataLink, ways
from e2e.faults import Mending
from engine.faults import Faults
from engines import sglang_replicas, vllm_replicas
from ports import free_port

ROLES = {"p": "prefill", "d": "decode", "o": "both"}
ENGINES = {"v": "vllm", "s": "sglang", "m": "mlx"}
CONTEXT = 8192
BUFFER_TOKENS = CONTEXT - 128
"""What a prefill replica's buffer holds."""
BUFFER = f'buffer_bytes = "{BUFFER_TOKENS // 64 * 128}KiB"'
KV_OWNERS = ("Worker", "scheduler")
"""In the name of the process that owns a replica's KV memory: vLLM's, SGLang's."""
PLANE = "pdctl.handoff.apart"
"""In that of its data plane's."""


def mixed_text(
    name: str,
    model_dir: Path,
    replicas: str,
    *,
    bind: str,
    faults: Faults,
    links: dict[str, DataLink],
    model: str = "tiny",
    handoff: str = "",
    context_length: int = CONTEXT,
    dtype_of_vllm: str = "float32",
    **options: Any,
) -> str:
    """Replicas by name: its first letter is the engine's, its second the role's (`vp`, `md`)."""
    head = head_text(name, bind=bind, model=model, context_length=context_length, handoff=handoff)
    return head + "".join(
        replica_text(replica, model_dir, faults, links, dtype_of_vllm, core % 2, options)
        for core, replica in enumerate(replicas.split())
    )


def replica_text(
    name: str,
    model_dir: Path,
    faults: Faults,
    links: dict[str, DataLink],
    dtype_of_vllm: str,
    core: int,
    options: dict[str, Any],
) -> str:
    engine = ENGINES[name[0]]
    python, env, config = {
        "vllm": (vllm_replicas.PYTHON, of_vllm(faults, core), {**vllm_replicas.OPTIONS, **options}),
        "sglang": (sglang_replicas.PYTHON, of_sglang(faults), sglang_replicas.OPTIONS),
        "mlx": (ENGINE_PYTHON, engine_env(), {}),
    }[engine]
    if links and name[1] == "d":
        env |= ways(links.values())
    port = f"data_port = {links[name].target[1]}" if name in links else ""
    return f"""
[[replicas]]
name = "{name}"
engine = "{engine}"
role = "{ROLES[name[1]]}"
model = "{model_dir}"
compute_dtype = "{dtype_of_vllm if engine == "vllm" else "float32"}"
python = "{python}"
env = {as_toml(env)}
engine_config = {as_toml(config)}
{port}
"""


def of_vllm(faults: Faults, core: int) -> dict[str, str]:
    return {**faults.environment, "VLLM_CPU_OMP_THREADS_BIND": str(core)}


def of_sglang(faults: Faults) -> dict[str, str]:
    env = {**faults.environment, **faults.clock, **sglang_replicas.CPU_ENV}
    del env["PDCTL_RUN"]  # an agent's own to give
    return env


def as_toml(value: object) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {as_toml(each)}' for key, each in value.items())} }}"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


class Mixed(Mending):
    """With `linked`, the pages of each prefill replica go through one of `links`."""

    def __init__(
        self, folder: Path, model_dir: Path, replicas: str, *, linked: bool = False, **options: Any
    ) -> None:
        super().__init__(folder, model_dir)
        self.model = options.get("model", "tiny")
        self.model_dir = model_dir
        self.faults = Faults(folder)
        prefills = [name for name in replicas.split() if linked and name[1] == "p"]
        self.links = {name: DataLink(("127.0.0.1", free_port())) for name in prefills}
        self._open = ExitStack()
        self._replicas = replicas
        self._options = options
        self.write()

    def write(self, *more: str) -> None:
        """The file, with these MLX replicas besides."""
        text = mixed_text(
            *(self.name, self.model_dir, " ".join([self._replicas, *more])),
            bind=self.bind,
            faults=self.faults,
            links=self.links,
            **self._options,
        )
        self.topology.write_text(text)

    def __enter__(self) -> Mixed:
        for link in self.links.values():
            self._open.enter_context(link)
        self.up()
        self.at_rest = self.census()
        return self

    def __exit__(self, *ended: object) -> None:
        self.mend()
        super().__exit__(*ended)
        self._open.close()

    def mend(self) -> None:
        for link in self.links.values():
            link.mend()

    # -- processes

    def census(self) -> Counter[str]:
        """Of each replica's process and all that it started."""
        names = (replica["name"] for replica in self.status()["replicas"])
        return Counter({name: len(self.processes(name)) for name in names})

    def processes(self, replica: str) -> list[psutil.Process]:
        """A replica's own process, and all that it started."""
        first = psutil.Process(self.replica(replica)["pid"])
        return [first, *first.children(recursive=True)]

    def footprint(self) -> dict[str, tuple[int, int]]:
        """Replica → (resident MiB, open file descriptors) of all its processes."""
        found = {}
        for name in self.census():
            family = self.processes(name)
            resident = sum(process.memory_info().rss for process in family) >> 20
            found[name] = (resident, sum(process.num_fds() for process in family))
        return found

    def kill_worker(self, replica: str) -> int:
        """SIGKILL to the process of a replica that owns its KV memory; the replica's pid. Its data
        plane is gone on return: it notices once the system has taken the other's memory back."""
        pid = int(self.replica(replica)["pid"])
        family = self.processes(replica)
        worker = next(p for p in family if any(kind in title(p) for kind in KV_OWNERS))
        planes = [child for child in worker.children() if PLANE in title(child)]
        os.kill(worker.pid, signal.SIGKILL)
        self.wait("its data plane is gone", lambda: not any(map(runs, planes)), 10)
        return pid

    def kill_plane(self, replica: str) -> None:
        """SIGKILL to the process that its data plane runs in."""
        family = self.processes(replica)
        plane = next(p for p in family if PLANE in title(p))
        os.kill(plane.pid, signal.SIGKILL)

    def leftovers(self) -> Iterator[str]:
        """vLLM's and SGLang's processes rename themselves; each wrote down that it started."""
        yield from super().leftovers()
        for process in psutil.process_iter(["pid", "name", "status"]):
            found = process.info
            renamed = found["name"].startswith(("VLLM::", "sglang::"))
            runs = found["status"] != psutil.STATUS_ZOMBIE
            if renamed and runs and self.faults.has_started(found["pid"]):
                yield f"{found['pid']} {found['name']}"

    # -- what its engines have done

    def computed_tokens(self, replica: str) -> float:
        """Prompt tokens that a replica has computed, or found, by its engine's own account."""
        if replica[0] != "v":
            return float(self.replica(replica)["prompt_tokens"])
        return self.metric(replica, "vllm:prompt_tokens_total")

    def kept(self, replica: str) -> float:
        """The share of vLLM's blocks that some request holds."""
        return self.metric(replica, "vllm:kv_cache_usage_perc")

    def metric(self, replica: str, name: str) -> float:
        """One of vLLM's own."""
        port = self.record().plan.replica(replica).http_port
        lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
        found = next(line for line in lines if line.startswith(name))
        return float(found.rsplit(" ", 1)[1])


def runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def title(process: psutil.Process) -> str:
    return " ".join(process.cmdline())
