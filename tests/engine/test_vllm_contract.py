"""One checkpoint is one contract, whichever engine reads or loads it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine.vllm_pairs import Four
from engines.replicas import PYTHON as MLX_PYTHON
from engines.replicas import contract_of
from engines.vllm_replicas import PYTHON as VLLM_PYTHON
from engines.vllm_replicas import needs_vllm

from pdctl.engines.interface import Probe
from pdctl.engines.registry import spec_for
from pdctl.topology.contract import Attention, Contract, Positions
from pdctl.topology.model import ComputeDtype, Engine, Host, Replica, Role

pytestmark = [pytest.mark.engine, needs_vllm]

PYTHONS = {Engine.VLLM: VLLM_PYTHON, Engine.MLX: MLX_PYTHON}


def probed(engine: Engine, model: Path) -> Probe:
    replica = Replica(
        name="x0",
        engine=engine,
        role=Role.PREFILL,
        model=str(model),
        python=str(PYTHONS[engine]),
        compute_dtype=ComputeDtype.FLOAT32,
    )
    command = spec_for(engine).probe(replica, Host(name="local"))
    done = subprocess.run(
        command.argv, env={**os.environ, **command.env}, capture_output=True, timeout=60, check=True
    )
    return msgspec.json.decode(done.stdout, type=Probe)


def as_read(contract: Contract, effective: dict[str, Any]) -> Contract:
    """The contract with an engine's own reading of the checkpoint in it."""
    known = msgspec.to_builtins(contract.positions)
    return msgspec.structs.replace(
        contract,
        attention=msgspec.convert(effective["attention"], Attention),
        positions=msgspec.convert({**known, **effective["positions"]}, Positions),
    )


def test_both_engines_read_one_contract_from_one_checkpoint(llama_dir: Path) -> None:
    """R56: heads, layers, positions, as each engine's own configuration has them."""
    contract = contract_of(llama_dir)
    for engine in PYTHONS:
        probe = probed(engine, llama_dir)
        assert probe.problems == ()
        assert probe.effective is not None
        assert as_read(contract, probe.effective).digest == contract.digest, engine


def test_both_engines_load_one_contract_from_one_checkpoint(four: Four) -> None:
    """R56: what each of the four says at its start, KV memory and rotary embeddings included."""
    for process in (four.vp, four.vd, four.mp, four.md):
        ready = process.agent.ready
        assert ready is not None
        loaded = msgspec.structs.replace(
            process.contract,
            attention=ready.effective.attention,
            positions=ready.effective.positions,
        )
        assert loaded.digest == process.contract.digest, process.name
