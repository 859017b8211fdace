"""vLLM and MLX on one GPU: alone, through vLLM's own handoff, and in pdctl's pairs.

A cluster of both engines in both roles is launched by `pdctl up`; beside it run an ordinary vLLM
and mlx-lm's own server, which have no connector, and two vLLMs with vLLM's NixlConnector. Prompts
have exactly the asked number of tokens and are in no prefix cache. In a round each way answers the
same prompt, one after the other. TTFT is the time to the first chunk with text of a streamed
answer: through the router for pairs, straight from the engine for what stands alone.

    floor       max(P alone, bytes / loopback rate) + D's decode step
    P alone     TTFT of the same engine without any connector
    D's step    TPOT of the decode replica, serving alone
    loopback    a plain socket copy of as many bytes between two processes, in the same run
    fixed cost  TTFT - P alone - D's step, of the shortest prompt
    idle loss   TTFT of a prefill replica asked directly, without a handoff, against the ordinary
                vLLM's, by turns

    python bench/gpu_pairs.py CHECKPOINT --vllm-python PYTHON --mlx-python PYTHON [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from gpu_engines import Engines, Server, free_port
from gpu_loopback import rates
from gpu_report import Cell, report_of, write
from gpu_ways import Direct, Nixl, Routed, Way

from pdctl.runtime.bench.columns import columns
from pdctl.runtime.bench.prompts import PromptSource
from pdctl.runtime.bench.target import Target, running
from pdctl.topology.model import PAGE_TOKENS, Engine

PDCTL = [sys.executable, "-c", "from pdctl.cli.app import main; main()"]
PACED = "vq"
PACED_BYTES_PER_S = 117_000_000
"""A saturated gigabit link."""
UP_S = 420
ALONE = {"v": "vllm", "m": "mlx"}
"""The way that measures an engine alone, by the first letter of a replica's name."""


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


def routed(target: Target) -> list[Routed]:
    """Every path of the cluster; those that stand alone give the pairs their decode step."""
    return [
        Routed(
            target,
            column,
            prefill=ALONE[column.prefill[0]] if column.prefill else None,
            step=column.decode if column.is_pair else None,
        )
        for column in columns(target.plan)
        if column.path not in ("mp>md", f"{PACED}>vd")
    ]


async def sweep(
    ways: Sequence[Way], prompts: PromptSource, lengths: Sequence[int], rounds: int, warm_ups: int
) -> dict[int, dict[str, Cell]]:
    """Cells by prompt length and way."""
    cells: dict[int, dict[str, Cell]] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for tokens in lengths:
            row = cells.setdefault(tokens, {way.name: Cell() for way in ways})
            for turn in range(warm_ups + rounds):
                key = f"{turn}/{time.monotonic_ns()}"
                prompt = prompts.prompt(tokens, key)
                for way in ways:
                    taken = await way.take(session, prompt, key)
                    if turn >= warm_ups or not taken.sample.ok:
                        row[way.name].add(taken)
            said = {name: cell.summary().get("ttft_ms") for name, cell in row.items()}
            print(f"{tokens} tokens: {said}", flush=True)
    return cells


class Run:
    """One checkpoint's measurements, in the order in which they are made."""

    def __init__(self, options: argparse.Namespace, engines: Engines, folder: Path) -> None:
        self._options, self._engines, self._folder = options, engines, folder
        self._prompts = PromptSource.of_checkpoint(engines.model, seed=0)

    def measured(self) -> dict[str, Any]:
        options, engines = self._options, self._engines
        with ExitStack() as stack:
            plain = stack.enter_context(engines.vllm("vllm"))
            alone = [Direct.of(plain, Engine.VLLM)]
            servers = [plain]
            if not options.no_mlx_alone:
                servers.append(stack.enter_context(engines.mlx("mlx")))
                alone.append(Direct.of(servers[-1], Engine.MLX))
            with ExitStack() as inner:
                beside = self._nixl(inner) if options.nixl == "beside" else []
                name, port = f"gpu-{os.getpid()}", free_port()
                text = topology(name, engines, port, paced=not options.no_paced)
                target = inner.enter_context(cluster(name, text, self._folder))
                idle = Direct("vp idle", Engine.VLLM, f"http://127.0.0.1:{port}", target.plan.model)
                wait(*servers, *(end for pair in beside for end in pair.ends))
                ways = [*alone, idle, *routed(target), *beside]
                cells = self._sweep(ways, options.rounds, options.warm_ups)
                by_turns = self._sweep([alone[0], idle], options.idle_rounds, 2)
            if options.nixl == "after":
                after = self._sweep(
                    [alone[0], *self._nixl(stack, ready=True)], options.rounds, options.warm_ups
                )
                cells = {tokens: {**after[tokens], **row} for tokens, row in cells.items()}
        page_bytes = target.plan.page_bytes or 0
        sizes = {n: -(-(n - 1) // PAGE_TOKENS) * page_bytes for n in options.lengths}
        copied = rates(sorted(set(sizes.values())))
        return report_of(cells, by_turns, sizes, copied, paced=(PACED, PACED_BYTES_PER_S))

    def _sweep(self, ways: Sequence[Way], rounds: int, warm_ups: int) -> dict[int, dict[str, Cell]]:
        return asyncio.run(sweep(ways, self._prompts, self._options.lengths, rounds, warm_ups))

    def _nixl(self, stack: ExitStack, *, ready: bool = False) -> list[Nixl]:
        ends = [stack.enter_context(self._engines.vllm_nixl(n)) for n in ("nixl p", "nixl d")]
        if ready:
            wait(*ends)
        return [Nixl(ends[0], ends[1], prefill="vllm", step="vd")]


def wait(*servers: Server) -> None:
    for server in servers:
        server.wait()


def engines_of(options: argparse.Namespace, logs: Path) -> Engines:
    on_cpu = options.device == "cpu"
    vllm: dict[str, Any] = {
        "block_size": 64,
        "kv_cache_memory_bytes": options.kv_bytes,
        "enforce_eager": not options.graphs,
        "max_num_seqs": 8,
        # not what is used, which the line above says, but what must be free at start
        "gpu_memory_utilization": 0.02,
    }
    one_thread = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    blas = Path("/usr/lib/x86_64-linux-gnu/libopenblas.so.0")
    quick_mlx = {"LD_PRELOAD": str(blas), "OPENBLAS_NUM_THREADS": "1"} if on_cpu else {}
    return Engines(
        options.checkpoint.resolve(),
        logs,
        vllm_python=options.vllm_python,
        mlx_python=options.mlx_python,
        vllm_options=vllm,
        vllm_env=one_thread if on_cpu else {},
        mlx_env=quick_mlx if blas.exists() else {},
        compute_dtype="float32" if on_cpu else "float16",
        context_length=options.context_length,
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--mlx-python", required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lengths", default="51,184,744,2844,8000")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--warm-ups", type=int, default=2)
    parser.add_argument("--idle-rounds", type=int, default=16)
    parser.add_argument("--nixl", choices=("beside", "after", "no"), default="beside")
    parser.add_argument("--no-paced", action="store_true")
    parser.add_argument(
        "--no-mlx-alone", action="store_true", help="no mlx-lm server: md's TTFT is MLX's P alone"
    )
    parser.add_argument("--graphs", action="store_true", help="torch.compile and CUDA graphs")
    parser.add_argument("--kv-bytes", type=int, default=2 << 30, help="each vLLM's KV memory")
    parser.add_argument("--context-length", type=int, default=8192)
    parser.add_argument("--quick", action="store_true", help="few rounds of short prompts")
    parser.add_argument("--logs", type=Path, help="kept there; else in a temporary folder")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    options.lengths = [int(n) for n in options.lengths.split(",")]
    if options.quick:
        options.lengths, options.rounds, options.warm_ups = [51, 184], 2, 1
        options.idle_rounds, options.context_length = 2, 2048
    return options


def main() -> int:
    options = parsed()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("XDG_STATE_HOME", scratch)
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        measured = Run(options, engines_of(options, logs), logs).measured()
    setting = {key: str(value) for key, value in vars(options).items()}
    for path in write(options.output, options.checkpoint.name, __doc__ or "", setting, measured):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
