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
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
from gpu_cluster import PACED, PACED_BYTES_PER_S, cluster, topology
from gpu_engines import Engines, Server, free_port
from gpu_loopback import rates
from gpu_report import Cell, Cells, report_of, write
from gpu_ways import Direct, Nixl, Routed, Way

from pdctl.runtime.bench.columns import columns
from pdctl.runtime.bench.prompts import PromptSource
from pdctl.runtime.bench.target import Target
from pdctl.topology.model import PAGE_TOKENS, Engine

NOT_ASKED_FOR = ("mp>md", f"{PACED}>vd")


def routed(target: Target) -> list[Routed]:
    """The paths of the cluster; those that stand alone give the pairs their decode step."""
    return [Routed(target, c) for c in columns(target.plan) if c.path not in NOT_ASKED_FOR]


async def sweep(
    ways: Sequence[Way],
    prompts: PromptSource,
    lengths: Sequence[int],
    rounds: int,
    warm_ups: int,
    cells: Cells,
) -> None:
    """Adds to the cells by prompt length and way."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for tokens in lengths:
            row = cells.setdefault(tokens, {})
            for turn in range(warm_ups + rounds):
                key = f"{turn}/{time.monotonic_ns()}"
                prompt = prompts.prompt(tokens, key)
                for way in ways:
                    taken = await way.take(session, prompt, key)
                    if turn >= warm_ups or not taken.sample.ok:
                        row.setdefault(way.name, Cell()).add(taken)
            said = {name: cell.summary().get("ttft_ms") for name, cell in row.items()}
            print(f"{tokens} tokens: {said}", flush=True)


class Run:
    """One checkpoint's measurements, in the order in which they are made."""

    def __init__(self, options: argparse.Namespace, engines: Engines, folder: Path) -> None:
        self._options, self._engines, self._folder = options, engines, folder
        self._prompts = PromptSource.of_checkpoint(engines.model, seed=0)
        self._page_bytes = 0
        self.cells: Cells = {}
        self.idle: Cells = {}

    def measure(self) -> None:
        options, engines = self._options, self._engines
        with ExitStack() as stack:
            servers = [stack.enter_context(engines.vllm("vllm"))]
            alone = [Direct.of(servers[0], Engine.VLLM)]
            if not options.no_mlx_alone:
                servers.append(stack.enter_context(engines.mlx("mlx")))
                alone.append(Direct.of(servers[1], Engine.MLX))
            with ExitStack() as inner:
                beside = self._nixl(inner) if options.nixl == "beside" else []
                name, port = f"gpu-{os.getpid()}", free_port()
                text = topology(name, engines, port, paced=not options.no_paced)
                target = inner.enter_context(cluster(name, text, self._folder))
                self._page_bytes = target.plan.page_bytes or 0
                idle = Direct("vp idle", Engine.VLLM, f"http://127.0.0.1:{port}", target.plan.model)
                wait(*servers, *(end for pair in beside for end in pair.ends))
                self._sweep([*alone, idle, *routed(target), *beside], self.cells)
                self._sweep([alone[0], idle], self.idle, options.idle_rounds)
            if options.nixl == "after":
                self._sweep(self._nixl(stack, ready=True), self.cells)

    def report(self) -> dict[str, Any]:
        """Of what has been measured so far."""
        sizes = {n: -(-(n - 1) // PAGE_TOKENS) * self._page_bytes for n in self.cells}
        copied = rates(sorted(set(sizes.values())))
        return report_of(self.cells, self.idle, sizes, copied, paced=(PACED, PACED_BYTES_PER_S))

    def _sweep(self, ways: Sequence[Way], cells: Cells, rounds: int | None = None) -> None:
        options = self._options
        asyncio.run(
            sweep(
                *(ways, self._prompts, options.lengths),
                *(rounds or options.rounds, options.warm_ups, cells),
            )
        )

    def _nixl(self, stack: ExitStack, *, ready: bool = False) -> list[Nixl]:
        ends = [stack.enter_context(self._engines.vllm_nixl(n)) for n in ("nixl p", "nixl d")]
        if ready:
            wait(*ends)
        return [Nixl(*ends)]


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
    # what was started is stopped, and what was measured is written, however it ends
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("XDG_STATE_HOME", scratch)
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        run = Run(options, engines_of(options, logs), logs)
        try:
            run.measure()
        finally:
            if run.cells:
                _write(options, run.report())
    return 0


def _write(options: argparse.Namespace, measured: dict[str, Any]) -> None:
    setting = {key: str(value) for key, value in vars(options).items()}
    for path in write(options.output, options.checkpoint.name, __doc__ or "", setting, measured):
        print(path)


if __name__ == "__main__":
    sys.exit(main())
