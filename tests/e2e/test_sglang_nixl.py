"""`transport = "nixl"` as a user has it: vLLM decodes and reads pages out of SGLang's and
vLLM's memory. The other pairs, bit for bit, are `tests/engine/test_sglang_vllm_nixl.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.mixed import Mixed
from e2e.natives import check_answers, check_killed, check_leaving, check_loopback
from engines.sglang_replicas import needs_sglang
from engines.vllm_replicas import needs_vllm
from tiny import digits

pytestmark = [pytest.mark.engine, pytest.mark.slow, needs_sglang, needs_vllm]

PATH = "sp>vd"
PAGE_BYTES = 128 << 10


@pytest.fixture(scope="module")
def pair(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    options = {"context_length": 2048, "handoff": 'transport = "nixl"'}
    folder = tmp_path_factory.mktemp("nixl")
    with Mixed(folder, checkpoints["llama"], "sp vd vp", **options) as cluster:
        yield cluster


@pytest.mark.parametrize("tokens", [65, 700])
def test_its_answers_are_those_of_decode_alone(pair: Mixed, tokens: int) -> None:
    check_answers(pair, PATH, "vd", tokens)


def test_the_way_of_its_pages_is_told(pair: Mixed) -> None:
    """By plan, ps, /status and the answer itself; its bytes are the host's."""
    before = pair.pair("sp", "vd")
    answer = pair.completion(digits(193, 5), PATH, max_tokens=2, cache_salt="told")
    assert (answer.status_code, answer.headers["x-pdctl-transport"]) == (200, "nixl")
    after = pair.pair("sp", "vd")
    assert after["transport"] == "nixl"
    assert after["transport_reason"].startswith("nixl: written in the file")
    assert after["host_bytes"] - before["host_bytes"] == 3 * PAGE_BYTES
    assert after["gpu_bytes"] == 0
    assert "(nixl: written in the file" in pair.pdctl("plan", pair.topology).stdout
    assert "transport nixl: written in the file" in pair.pdctl("ps", pair.topology).stdout


def test_nothing_listens_beyond_loopback(pair: Mixed) -> None:
    check_loopback(pair, "sp", "vp", "vd")


def test_clients_that_leave_leave_nothing(pair: Mixed) -> None:
    """R10: also while pages are read."""
    check_leaving(pair, PATH, 12)
    check_answers(pair, PATH, "vd", 130)


@pytest.mark.parametrize("killed", ["sp", "vp"])
def test_a_killed_prefill_replica_comes_back(pair: Mixed, killed: str) -> None:
    """Decode goes on and reads the pages of the process that comes instead."""
    check_killed(pair, f"{killed}>vd", "vd", killed)
