"""Checkpoints, prompts and started replicas for the tests that drive real engine processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from engines.replicas import Pair, Process, contract_of
from tiny import make_checkpoint

from pdctl.topology.contract import Contract
from pdctl.topology.model import ComputeDtype, Role


class Trio(msgspec.Struct):
    """p0 → d0, and o0 that serves alone."""

    pair: Pair
    alone: Process
    model_dir: Path
    contract: Contract


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """Short, because a Unix socket's path must be."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pdctl-t") as made:
        yield Path(made)


@pytest.fixture(scope="session")
def llama_dir(folder: Path) -> Path:
    return make_checkpoint(folder / "llama", "llama")


@pytest.fixture(scope="module")
def llama(folder: Path, llama_dir: Path) -> Iterator[Trio]:
    """One trio on the tiny Llama, in float32, for a whole module."""
    with ExitStack() as stack:
        yield trio(stack, folder, llama_dir, ComputeDtype.FLOAT32)


def trio(stack: ExitStack, folder: Path, model_dir: Path, compute: ComputeDtype) -> Trio:
    contract = contract_of(model_dir)
    started = [
        stack.enter_context(Process(folder, name, role, model_dir, contract, compute=compute))
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE), ("o0", Role.BOTH))
    ]
    return Trio(Pair(started[0], started[1]), started[2], model_dir, contract)
