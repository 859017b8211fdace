"""What every program for a GPU box is told: shapes, engines, lengths, and how long it may take."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_budget import Budget
from gpu_engines import ENGINES, Site

HERE = Path(__file__).resolve().parent
UP_SHARE = 0.85
"""Of the time that is left, what a launch may take."""


def parser_of(doc: str, *, engines: str, lens: str, context_length: int) -> argparse.ArgumentParser:
    """Lengths, engines and shapes are measured in the order in which they are named."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default=engines)
    parser.add_argument("--shapes", default="0.5b", help="0.5b, 7b; tiny to try the program")
    parser.add_argument("--lens", default=lens, help="tokens of the prompts")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=3600.0,
        help="when they are over, nothing more is begun; what was left out is told",
    )
    for engine in ENGINES:
        parser.add_argument(f"--{engine}-python", help=f"of the environment that has {engine}")
    parser.add_argument("--tokenizer", type=Path, help="a checkpoint, to make the shapes with")
    parser.add_argument("--checkpoints", type=Path, help="where shapes are, or are made: DIR/SHAPE")
    parser.add_argument("--device", choices=("cuda", "cpu", "host"), default="cuda")
    parser.add_argument(
        "--devices", default="0", help="GPUs: prefill is on the first named, decode on the last"
    )
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs; else eager")
    parser.add_argument("--pool-tokens", type=int, default=65536, help="KV pool of each engine")
    parser.add_argument("--lanes", type=int, default=32, help="requests at once in an engine")
    parser.add_argument("--context-length", type=int, default=context_length)
    parser.add_argument(
        "--after",
        type=int,
        metavar="PID",
        help="everything is started, and measured once that process has ended",
    )
    parser.add_argument("--logs", type=Path, help="kept there; else in a temporary folder")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    return parser


def split(parser: argparse.ArgumentParser, words: list[str] | None = None) -> argparse.Namespace:
    """The words, with lists for what has commas."""
    options = parser.parse_args(words)
    options.engines = options.engines.split(",")
    options.shapes = options.shapes.split(",")
    options.devices = [int(n) for n in options.devices.split(",")]
    options.lens = [int(n) for n in options.lens.split(",")]
    missing = [e for e in options.engines if not getattr(options, f"{e}_python", None)]
    if missing:
        parser.error(f"say --{missing[0]}-python for the engine {missing[0]}")
    return options


def site_of(options: argparse.Namespace, shape: str, logs: Path) -> Site:
    logs.mkdir(parents=True, exist_ok=True)
    return Site(
        model=checkpoint(options, shape),
        logs=logs,
        pythons={engine: getattr(options, f"{engine}_python") for engine in ENGINES},
        device=options.device,
        graphs=options.graphs,
        pool_tokens=options.pool_tokens,
        lanes=options.lanes,
        context_length=options.context_length,
        devices=tuple(options.devices),
        after=options.after,
    )


def checkpoint(options: argparse.Namespace, shape: str) -> Path:
    """That of the shape; made first where it is not there whole."""
    folder = (options.checkpoints or Path(tempfile.gettempdir()) / "gpu-shapes").resolve() / shape
    if not (folder / "model.safetensors.index.json").exists():
        if options.tokenizer is None:
            raise SystemExit(f"{folder} is not there: say --tokenizer to make it")
        with_torch = options.vllm_python or options.sglang_python or sys.executable
        argv = [with_torch, str(HERE / "gpu_shapes.py"), str(folder), shape]
        subprocess.run([*argv, "--tokenizer", str(options.tokenizer)], check=True)
    return folder


@contextmanager
def run(options: argparse.Namespace) -> Iterator[tuple[Budget, Path]]:
    """The budget, and a folder for logs. SIGTERM ends a run as Ctrl-C does: what was started is
    stopped, and what was measured is written."""
    budget = Budget(options.budget_s)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("XDG_STATE_HOME", scratch)
        logs = (options.logs or Path(scratch)).resolve()
        logs.mkdir(parents=True, exist_ok=True)
        yield budget, logs


def to_be_up_s(options: argparse.Namespace, on_gpu_s: float) -> float:
    """What is asked for engines to be up, of the time that is left: on a CPU nothing."""
    return on_gpu_s if options.device == "cuda" else 0.0


def each_shape(
    options: argparse.Namespace, measured: Callable[[Budget, str, Path], None], up_s: float
) -> int:
    """One after the other, each with what is left of the time by then; a shape whose engines
    would not be up in time is left out. Exit status 0.

    Args:
        up_s: what they take on a GPU.
    """
    with run(options) as (budget, logs):
        for number, shape in enumerate(options.shapes):
            if budget.allows(f"shape {shape}", to_be_up_s(options, up_s)):
                measured(budget.part(1 / (len(options.shapes) - number)), shape, logs / shape)
    return 0
