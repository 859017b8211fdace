"""Checkpoints, prompts and started replicas for the tests that drive real engine processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from engine.faults import Faults
from engine.vllm_pairs import BLOCKS, BUFFER_PAGES, CHUNK_TOKENS, Four
from engines.replicas import Pair, Process, contract_of
from engines.vllm_replicas import VllmProcess
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


@pytest.fixture(scope="session")
def faults(folder: Path) -> Faults:
    return Faults(folder)


@pytest.fixture(scope="session")
def four(folder: Path, llama_dir: Path, faults: Faults) -> Iterator[Four]:
    """Each engine in both roles. vLLM computes prompts in chunks of 128 tokens; its block sizes
    differ; prefill's buffer and decode's memory hold one whole context at a time."""
    contract = contract_of(llama_dir)
    with ExitStack() as stack:
        vp, vd = (
            stack.enter_context(
                VllmProcess(
                    *(folder, name, role, llama_dir, contract),
                    env=faults.environment,
                    buffer_bytes=BUFFER_PAGES * contract.page_bytes,
                    max_num_batched_tokens=CHUNK_TOKENS,
                    **options,
                )
            )
            for name, role, options in (
                ("vp0", Role.PREFILL, {"block_size": 128}),
                ("vd0", Role.DECODE, {"num_gpu_blocks_override": BLOCKS}),
            )
        )
        mp, md = (
            stack.enter_context(Process(folder, name, role, llama_dir, contract))
            for name, role in (("mp0", Role.PREFILL), ("md0", Role.DECODE))
        )
        vp.await_ready()
        vd.await_ready()
        yield Four(vp, vd, mp, md)


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
