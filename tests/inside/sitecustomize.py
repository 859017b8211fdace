"""Python runs this at the start of every process whose PYTHONPATH has this folder: tests put it
there to break an engine from inside (`broken.py`), process by process, without a seam in pdctl,
and to have each process say what it was started with.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

BROKEN = (
    "pdctl.engines.vllm.layout",
    "pdctl.engines.vllm.legs",
    "pdctl.engines.vllm.scheduling",
    "vllm.model_executor.layers.rotary_embedding",
)


class Breaking(MetaPathFinder):
    """Lets `broken.py` at each of these modules once it has run."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name not in BROKEN:
            return None
        spec = PathFinder.find_spec(name, path, target)
        return None if spec is None else _broken(spec)


def _broken(spec: ModuleSpec) -> ModuleSpec:
    loader: Any = spec.loader
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        import broken

        broken.patch(module)

    loader.exec_module = exec_module
    return spec


def write_down() -> None:
    """Environment and arguments, in a file of this process beside the fault's."""
    folder = Path(os.environ["PDCTL_TEST_FAULT"]).parent / "started"
    folder.mkdir(exist_ok=True)
    told = {"environment": dict(os.environ), "arguments": sys.orig_argv}
    (folder / f"{os.getpid()}.json").write_text(json.dumps(told))


if "PDCTL_TEST_FAULT" in os.environ:
    sys.meta_path.insert(0, Breaking())
    write_down()
