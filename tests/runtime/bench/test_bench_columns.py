from __future__ import annotations

import msgspec
import pytest
from runtime.bench.bench_router import PAGE_BYTES, plan, replica_plan

from pdctl.runtime.bench.columns import columns, required
from pdctl.topology.model import Engine, Role, Transport


def test_the_decode_engine_alone_comes_before_the_pair_and_is_its_baseline() -> None:
    alone, pair = columns(plan())
    assert (alone.path, alone.is_pair) == ("d0", False)
    assert (pair.path, pair.baseline, pair.decode, pair.prefill) == ("p0>d0", "d0", "d0", "p0")


def test_ordinary_replicas_and_every_pair_have_a_column() -> None:
    found = columns(
        plan(
            replica_plan("p0", Role.PREFILL),
            replica_plan("p1", Role.PREFILL),
            replica_plan("d0", Role.DECODE),
            replica_plan("o0", Role.BOTH),
            pairs=(("p0", "d0"), ("p1", "d0")),
        )
    )
    assert [column.path for column in found] == ["d0", "o0", "p0>d0", "p1>d0"]


def test_a_prefill_engine_of_its_own_kind_is_shown_alone_too() -> None:
    found = columns(
        plan(replica_plan("p0", Role.PREFILL, Engine.VLLM), replica_plan("d0", Role.DECODE))
    )
    assert [column.path for column in found] == ["d0", "p0", "p0>d0"]


def test_an_engine_that_serves_nothing_alone_has_no_column_of_its_own() -> None:
    found = columns(
        plan(
            replica_plan("p0", Role.PREFILL, Engine.SGLANG),
            replica_plan("d0", Role.DECODE, Engine.SGLANG),
        )
    )
    assert [(column.path, column.baseline) for column in found] == [("p0>d0", None)]


def test_an_ordinary_replica_stands_in_as_the_baseline() -> None:
    found = columns(
        plan(
            replica_plan("p0", Role.PREFILL, Engine.SGLANG),
            replica_plan("d0", Role.DECODE, Engine.SGLANG),
            replica_plan("o0", Role.BOTH, Engine.SGLANG),
        )
    )
    assert found[-1].baseline == "o0"


def test_an_mlx_decode_needs_all_positions_but_the_last_in_whole_pages() -> None:
    pair = columns(plan())[-1]
    for tokens, pages in ((51, 1), (64, 1), (65, 1), (66, 2), (129, 2), (130, 3)):
        need = required(pair, tokens, PAGE_BYTES)
        assert need.imported_tokens == tokens - 1
        assert (need.host_bytes, need.gpu_bytes) == (pages * PAGE_BYTES, 0)


def test_an_sglang_decode_needs_the_whole_prompt() -> None:
    pair = columns(
        plan(replica_plan("p0", Role.PREFILL), replica_plan("d0", Role.DECODE, Engine.SGLANG))
    )[-1]
    need = required(pair, 65, PAGE_BYTES)
    assert (need.imported_tokens, need.host_bytes) == (65, 2 * PAGE_BYTES)


@pytest.mark.parametrize("engine", [Engine.VLLM, Engine.SGLANG])
def test_an_engine_s_own_handoff_takes_the_whole_prompt_in_its_own_blocks(engine: Engine) -> None:
    """Their bytes are the engine's, and no page's."""
    ends = (replica_plan("p0", Role.PREFILL, engine), replica_plan("d0", Role.DECODE, engine))
    pair = msgspec.structs.replace(columns(plan(*ends))[-1], transport=Transport.NATIVE)
    need = required(pair, 65, PAGE_BYTES)
    assert (need.imported_tokens, need.host_bytes, need.gpu_bytes) == (65, None, None)


def test_pages_between_devices_must_be_the_gpus_bytes_alone() -> None:
    """S4, S7, S9: a byte through the host is a mark on the cell."""
    between = plan()
    pairs = tuple(
        msgspec.structs.replace(p, transport=Transport.NIXL, on_device=True) for p in between.pairs
    )
    pair = columns(msgspec.structs.replace(between, pairs=pairs))[-1]
    need = required(pair, 129, PAGE_BYTES)
    assert (need.host_bytes, need.gpu_bytes) == (0, 2 * PAGE_BYTES)


def test_an_engine_alone_must_import_nothing() -> None:
    need = required(columns(plan())[0], 65, PAGE_BYTES)
    assert (need.imported_tokens, need.host_bytes, need.gpu_bytes) == (0, 0, 0)
