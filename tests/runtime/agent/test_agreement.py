from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from runtime.clusters import contract, declared

from pdctl.engines.channel import Effective, Ready
from pdctl.runtime.agent.agreement import disagreements
from pdctl.topology.model import ComputeDtype, Engine
from pdctl.topology.plan import ReplicaPlan, derive


@pytest.fixture
def plan(tmp_path: Path) -> ReplicaPlan:
    return derive(declared(tmp_path), contract()).replica("p0")


def _ready(plan: ReplicaPlan, **changes: Any) -> Ready:
    effective = Effective(
        attention=contract().attention,
        positions=contract().positions,
        compute_dtype=plan.compute_dtype,
    )
    message = Ready(
        engine=Engine.MLX,
        engine_version="1",
        effective=effective,
        http_port=plan.http_port,
        data_port=plan.data_port,
    )
    return msgspec.structs.replace(message, **changes)


def test_an_engine_that_loaded_the_contract_agrees(plan: ReplicaPlan) -> None:
    """Equal effective values and the planned ports are no disagreement."""
    assert disagreements(_ready(plan), contract(), plan) == []


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("attention", "layers", 3),
        ("attention", "kv_heads", 9),
        ("attention", "head_dim", 128),
        ("attention", "kind", "sliding"),
        ("positions", "rope_theta", 10_001.0),
        ("positions", "scaling", {"type": "linear", "factor": 2.0}),
        ("positions", "max_positions", 7),
        ("positions", "context_length", 255),
    ],
)
def test_each_effective_value_is_compared_by_name(
    plan: ReplicaPlan, part: str, field: str, value: object
) -> None:
    """R54: whatever the engine loaded differently is named, with both values."""
    effective = _ready(plan).effective
    changed = msgspec.structs.replace(getattr(effective, part), **{field: value})
    message = _ready(plan, effective=msgspec.structs.replace(effective, **{part: changed}))
    (sentence,) = disagreements(message, contract(), plan)
    assert sentence.startswith(f"{part}.{field} should be ")
    assert msgspec.json.encode(value, order="sorted").decode() in sentence


def test_another_compute_dtype_is_named(plan: ReplicaPlan) -> None:
    """An engine that computes in another type than planned does not start."""
    effective = msgspec.structs.replace(_ready(plan).effective, compute_dtype=ComputeDtype.FLOAT16)
    (sentence,) = disagreements(_ready(plan, effective=effective), contract(), plan)
    assert sentence == 'compute_dtype should be "float32", the engine has "float16"'


@pytest.mark.parametrize("field", ["http_port", "data_port"])
def test_another_port_is_named(plan: ReplicaPlan, field: str) -> None:
    """U15: an engine that listens elsewhere than the plan says is not announced."""
    (sentence,) = disagreements(_ready(plan, **{field: 1}), contract(), plan)
    assert sentence.startswith(f"{field} should be ")
