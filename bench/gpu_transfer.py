"""The transfer alone: handoffs between two devices' KV memory, beside plain copies.

`gpu_transfer_nixl.py` says what is measured over NIXL, `gpu_transfer_tcp.py` what over TCP. On a
host (`--device host`) its own memory stands for a device's.

Needs torch, triton and, for NIXL, that: run it with a vLLM or SGLang environment's Python.

    PYTHON bench/gpu_transfer.py [--transport nixl|tcp|both] [--shapes 0.5b,7b]
        [--lens 744,2844,8000] [--devices 0,1] [--budget-s 90]
"""

from __future__ import annotations

import argparse
import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu_budget import Budget
from gpu_report import closing, write
from gpu_shapes import SHAPES

from pdctl.handoff.page import PageGeometry

HERE = Path(__file__).resolve().parent
TRANSPORTS = ("nixl", "tcp")
PACKAGES = ("torch", "triton", "nixl", "nixl-cu12", "nixl-cu13", "numpy")
START_S = 10.0
"""What is left at least where a shape is begun."""


def geometry_of(shape: str) -> PageGeometry:
    config = SHAPES[shape]
    dim = config["hidden_size"] // config["num_attention_heads"]
    return PageGeometry(config["num_hidden_layers"], config["num_key_value_heads"], dim)


def measure(transport: str, options: argparse.Namespace, budget: Budget) -> list[str]:
    """Every shape; writes what there is after each of them. The tables."""
    ends = (options.devices[0], options.devices[-1])
    devices = ("cpu", "cpu")
    if options.device == "cuda":
        devices = (f"cuda:{ends[0]}", f"cuda:{ends[1]}")
    variant = "host" if options.device == "host" else f"{len(set(ends))}-gpu"
    if transport != "nixl":
        variant = f"{transport}-{variant}"
    bench = importlib.import_module(f"gpu_transfer_{transport}")
    found: dict[str, list[dict[str, Any]]] = {}
    lines: list[str] = []
    for at, shape in enumerate(options.shapes):
        if not budget.allows(f"{transport}, shape {shape}", START_S):
            continue
        part = budget.part(1 / (len(options.shapes) - at))
        found[shape] = bench.shape_of(shape, geometry_of(shape), options, devices, part)
        lines += bench.table(shape, found[shape])
        told = {"packages": versions(), **bench.TOLD}
        whole = {**told, "results": found, "left_out": budget.left_out, "used_s": budget.used_s}
        closed = [*lines, *closing(budget.left_out, {})]
        write("gpu_transfer", variant, bench.METHOD, options, whole, closed)
    return lines


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", choices=(*TRANSPORTS, "both"), default="nixl")
    parser.add_argument("--shapes", default="0.5b,7b")
    parser.add_argument("--lens", default="744,2844,8000", help="tokens of the prompts")
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument(
        "--devices", default="0", help="prefill is on the first, decode on the last"
    )
    parser.add_argument(
        "--layer-ms",
        type=float,
        help="over TCP: what a layer's forward takes of 8000 tokens; else by shape",
    )
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--budget-s", type=float, default=90.0)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.set_defaults(engines=[], graphs=False)
    options = parser.parse_args()
    options.shapes = options.shapes.split(",")
    options.lens = [int(tokens) for tokens in options.lens.split(",")]
    options.devices = [int(number) for number in options.devices.split(",")]
    return options


def main() -> int:
    options = parsed()
    budget = Budget(options.budget_s)
    chosen = TRANSPORTS if options.transport == "both" else (options.transport,)
    for at, transport in enumerate(chosen):
        part = budget.part(1 / (len(chosen) - at))
        print("\n".join(measure(transport, options, part)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
