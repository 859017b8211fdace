"""Every engine's own options in `engine_config`: passed on, or refused by name."""

from __future__ import annotations

import pytest
from engines.specs import declared

from pdctl.engines.engine_config import Flags
from pdctl.engines.mlx.options import OWNED, PASSED
from pdctl.engines.registry import spec_for
from pdctl.engines.sglang.options import FLAGS as SGLANGS
from pdctl.engines.vllm.options import FLAGS as VLLMS
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import Engine

MLX, SGLANG, VLLM = Engine.MLX, Engine.SGLANG, Engine.VLLM
OWNED_BY_PDCTL = {
    MLX: "host port kv_bits draft-model Trust_Remote_Code",
    VLLM: "host port kv_transfer_config tensor-parallel-size Trust_Remote_Code dtype",
    SGLANG: """
        host port page_size tp-size Trust_Remote_Code dtype api_key kv_cache_dtype
        disaggregation_transfer_backend disaggregation-bootstrap-port""",
}


def problem(engine: Engine, key: str, value: object) -> Diagnostic:
    """The one of an `engine_config` that has this entry alone."""
    (found,) = spec_for(engine).check(declared(engine, engine_config={key: value}))
    return found


@pytest.mark.parametrize(
    ("engine", "key"), [(e, key) for e, keys in OWNED_BY_PDCTL.items() for key in keys.split()]
)
def test_options_that_pdctl_owns_are_refused_by_name(engine: Engine, key: str) -> None:
    """R51: however they are spelled."""
    found = problem(engine, key, 1)
    assert found.code == "topology.engine_config.owned"
    assert found.field == f"engine_config.{key}"
    assert key in found.summary
    assert found.hint


@pytest.mark.parametrize(
    ("engine", "key", "nearest"),
    [
        (MLX, "prefil_step_size", "prefill_step_size"),
        (VLLM, "gpu_memory_utilisation", "gpu_memory_utilization"),
        (SGLANG, "chunk_prefill_size", "chunked_prefill_size"),
    ],
)
def test_an_unknown_option_names_the_nearest(engine: Engine, key: str, nearest: str) -> None:
    """U32: a typo in a per-replica key is an error, never dropped."""
    found = problem(engine, key, 128)
    assert found.code == "topology.engine_config.unknown"
    assert found.hint == f"did you mean {nearest}?"


@pytest.mark.parametrize(
    ("engine", "key", "value"),
    [
        (MLX, "max_tokens", "many"),
        (MLX, "max_tokens", 0),
        (MLX, "temp", -1),
        (MLX, "top_k", True),
        (MLX, "log_level", 3),
        (VLLM, "enforce_eager", 1),
        (VLLM, "max_num_seqs", True),
        (VLLM, "block_size", 100),
        (VLLM, "disable_log_stats", False),
        (SGLANG, "disable_cuda_graph", 1),
        (SGLANG, "max_total_tokens", True),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(engine: Engine, key: str, value: object) -> None:
    """Before the engine's own parser would end the process."""
    assert problem(engine, key, value).code == "topology.engine_config.value"


@pytest.mark.parametrize("flags", [VLLMS, SGLANGS], ids=["vllm", "sglang"])
def test_every_option_is_passed_or_refused_once(flags: Flags) -> None:
    """None is in two tables, so none is both."""
    assert not flags.switches & flags.values
    assert not (flags.switches | flags.values) & set(flags.owned)
    assert not set(PASSED) & set(OWNED)


@pytest.mark.parametrize("engine", [VLLM, SGLANG])
def test_more_than_one_device_is_refused(engine: Engine) -> None:
    """TP = PP = DP = 1."""
    (found,) = spec_for(engine).check(declared(engine, devices=(0, 1)))
    assert found.code == "topology.devices"
