from __future__ import annotations

from runtime.bench.bench_router import plan, replica_plan

from pdctl.runtime.bench.columns import columns
from pdctl.runtime.router.policy import declared_paths, pinnable_paths
from pdctl.topology.model import Engine, Role


def test_the_router_lets_a_sweep_pin_every_path_that_it_measures() -> None:
    plans = (
        plan(),
        plan(replica_plan("p0", Role.PREFILL, Engine.VLLM), replica_plan("d0", Role.DECODE)),
        plan(
            replica_plan("p0", Role.PREFILL, Engine.SGLANG),
            replica_plan("d0", Role.DECODE, Engine.SGLANG),
            replica_plan("o0", Role.BOTH, Engine.SGLANG),
        ),
    )
    for planned in plans:
        pinnable = {path.text for path in pinnable_paths(planned)}
        assert {column.path for column in columns(planned)} <= pinnable


def test_a_decode_replica_alone_takes_only_pinned_traffic() -> None:
    assert "d0" not in {path.text for path in declared_paths(plan())}
    assert "d0" in {path.text for path in pinnable_paths(plan())}
