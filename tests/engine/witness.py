"""What an engine holds in its KV memory, written down from inside its process.

The engine is a real one; only a module of the tests is loaded around pdctl's own
(`witness_vllm.py`, `witness_mlx.py`, `witness_sglang.py`), which copies the memory of each request
with a room to a file, while that is wanted, once the request's prompt is there. Values keep the
engine's own dtype.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

FOLDER_ENV = "PDCTL_TEST_WITNESS"
WANTED = "wanted"
WAIT_S = 30.0


def environment(folder: Path) -> dict[str, str]:
    """Of a process that is to load one of the modules."""
    tests = Path(__file__).parents[1]
    return {FOLDER_ENV: str(folder), "PYTHONPATH": f"{tests / 'inside'}:{tests}:{tests.parent}"}


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """In the test: what happens meanwhile is written down."""
    (folder / WANTED).touch()
    try:
        yield
    finally:
        (folder / WANTED).unlink()


def wanted() -> bool:
    """In the engine's process."""
    return (Path(os.environ[FOLDER_ENV]) / WANTED).exists()


def write(room: int, memory: np.ndarray) -> None:
    """In the engine's process; whole or not at all."""
    path = _path(Path(os.environ[FOLDER_ENV]), room, os.environ["PDCTL_REPLICA"])
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        np.save(file, memory)
    unfinished.rename(path)


def read(folder: Path, room: int, replica: str) -> Any:
    """In the test: what was written; fails where nothing comes."""
    path, deadline = _path(folder, room, replica), time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)
    return np.load(path)


def _path(folder: Path, room: int, replica: str) -> Path:
    return folder / f"{room}.{replica}.npy"
