"""Python runs this at the start of every process whose PYTHONPATH has this folder. Tests put it
there, without a seam in pdctl, to break an engine from inside (`broken.py`), to write down what one
holds (`engine/witness.py`), to have each process say what it was started with, to lead it to a
data link of the test's, to set its clock forward, and to have SGLang's memory copied
(`interpreted.py`) and vLLM's processes laid out (`one_process.py`) as on a GPU.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

BROKEN = (
    "pdctl.engines.sglang.pool",
    "pdctl.engines.sglang.receiving",
    "pdctl.engines.sglang.sending",
    "pdctl.engines.vllm.layout",
    "pdctl.engines.vllm.legs",
    "pdctl.engines.vllm.scheduling",
    "vllm.model_executor.layers.rotary_embedding",
)
WITNESSED = {
    "engine.witness_sglang": ("pdctl.engines.sglang.receiving", "pdctl.engines.sglang.sending"),
    "engine.witness_vllm": ("pdctl.engines.vllm.connector",),
}


class Patching(MetaPathFinder):
    """Lets modules of the tests (`patch`) at some modules once those have run."""

    def __init__(self) -> None:
        self._patchers: dict[str, list[str]] = {}

    def add(self, names: Iterable[str], patcher: str) -> None:
        for name in names:
            self._patchers.setdefault(name, []).append(patcher)

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name not in self._patchers:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            self._patched(spec, self._patchers[name])
        return spec

    def _patched(self, spec: ModuleSpec, patchers: list[str]) -> None:
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for patcher in patchers:
                import_module(patcher).patch(module)

        loader.exec_module = exec_module


def write_down() -> None:
    """Environment and arguments, in a file of this process beside the fault's."""
    folder = Path(os.environ["PDCTL_TEST_FAULT"]).parent / "started"
    folder.mkdir(exist_ok=True)
    told = {"environment": dict(os.environ), "arguments": sys.orig_argv}
    (folder / f"{os.getpid()}.json").write_text(json.dumps(told))


def redirect(ways: dict[int, int]) -> None:
    """A connection to one of these ports is made to another, on loopback (`e2e/data_link.py`)."""
    dial = socket.create_connection

    def through(address: Any, *rest: Any, **named: Any) -> socket.socket:
        if address[1] in ways:
            address = ("127.0.0.1", ways[address[1]])
        return dial(address, *rest, **named)

    socket.create_connection = through


if "PDCTL_TEST_WAYS" in os.environ:
    pairs = (pair.split(":") for pair in os.environ["PDCTL_TEST_WAYS"].split())
    redirect({int(port): int(way) for port, way in pairs})

if "PDCTL_TEST_AHEAD" in os.environ:
    import ahead

    ahead.start(Path(os.environ["PDCTL_TEST_AHEAD"]))

patching = Patching()
sys.meta_path.insert(0, patching)

if "PDCTL_TEST_FAULT" in os.environ:
    patching.add(BROKEN, "broken")
    write_down()

if "PDCTL_TEST_WITNESS" in os.environ:
    for patcher, names in WITNESSED.items():
        patching.add(names, patcher)

if "PDCTL_TEST_INTERPRETED" in os.environ:
    patching.add(("pdctl.engines.sglang.pool",), "interpreted")

if "PDCTL_TEST_ONE_PROCESS" in os.environ:
    patching.add(("vllm.platforms.cpu",), "one_process")
