"""What is stored, and what it holds for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime.router.cluster import plan_of

from pdctl.runtime.cost.record import (
    FORMAT,
    Costs,
    PathRecord,
    Sample,
    decode,
    encode,
    holds,
    identity,
)
from pdctl.topology.model import ComputeDtype, Engine
from pdctl.topology.plan import Plan

PLAN = plan_of("p0 d0")


def record(plan: Plan = PLAN, path: str = "p0>d0") -> PathRecord:
    assert plan.contract_digest is not None
    known = identity(plan, path)
    return PathRecord(identity=known, contract=plan.contract_digest, versions=("1", "2"))


def changed(**fields: Any) -> Plan:
    """The plan with d0 otherwise."""
    p0, d0 = PLAN.replicas
    declared = {k: fields.pop(k) for k in ("devices", "engine_config", "env") if k in fields}
    d0 = msgspec.structs.replace(
        d0, declared=msgspec.structs.replace(d0.declared, **declared), **fields
    )
    return msgspec.structs.replace(PLAN, replicas=(p0, d0))


@pytest.mark.parametrize(
    "fields",
    [
        {"engine": Engine.VLLM},
        {"compute_dtype": ComputeDtype.BFLOAT16},
        {"host": "elsewhere"},
        {"devices": (1,)},
        {"engine_config": {"prefill_step_size": 64}},
        {"env": {"OMP_NUM_THREADS": "1"}},
    ],
)
def test_a_record_is_dropped_with_what_it_was_measured_on(fields: dict[str, Any]) -> None:
    assert holds(record(), PLAN, "p0>d0", None)
    assert not holds(record(), changed(**fields), "p0>d0", None)


def test_a_record_is_of_its_weights_and_its_engines_versions() -> None:
    other = msgspec.structs.replace(PLAN, contract_digest="other")
    assert not holds(record(), other, "p0>d0", None)
    assert not holds(record(), PLAN, "p0>d0", ("1", "3"))
    assert holds(record(), PLAN, "p0>d0", ("1", "2"))


def test_ports_are_no_part_of_it() -> None:
    """They are assigned anew, and nothing takes longer for it."""
    assert holds(record(), changed(http_port=7), "p0>d0", None)


def test_a_replica_that_is_not_declared_any_more_has_none() -> None:
    assert not holds(record(), plan_of("p1 d1"), "p0>d0", None)


def test_offline_the_weights_are_not_known_and_not_compared() -> None:
    offline = msgspec.structs.replace(PLAN, contract_digest=None)
    assert holds(record(), offline, "p0>d0", None)


def test_what_was_stored_is_read_again() -> None:
    sample = Sample(tokens=744, ttft_s=0.2, at=1.0, prefill_s=0.1, transfer_s=0.01)
    costs = Costs(
        paths={"p0>d0": record().with_sample(sample).with_step(0.02)},
        lengths={"chat": ((100, 30),)},
    )
    assert decode(encode(costs)) == costs


@given(st.binary(max_size=200))
def test_whatever_else_is_in_the_file_is_nothing_measured(raw: bytes) -> None:
    assert decode(raw) == Costs()


def test_another_format_is_nothing_measured() -> None:
    later = msgspec.json.encode({"format": FORMAT + 1, "paths": {}, "lengths": {}})
    assert decode(later) == Costs()
    assert decode(None) == Costs()
