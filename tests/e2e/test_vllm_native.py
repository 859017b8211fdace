"""S5: vLLM's own NixlConnector between two replicas on CPUs, launched as a user does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from e2e.mixed import Mixed
from e2e.natives import (
    LENGTHS,
    NATIVE,
    check_answers,
    check_counted,
    check_leaving,
    check_loopback,
    needs_nixl,
)
from engines.vllm_replicas import PYTHON, needs_vllm
from tiny import digits

pytestmark = [pytest.mark.engine, pytest.mark.slow, needs_vllm, needs_nixl(PYTHON)]

PATH = "vp>vd"


@pytest.fixture(scope="module")
def pair(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    folder = tmp_path_factory.mktemp("native")
    with Mixed(folder, checkpoints["llama"], "vp vd", handoff=NATIVE) as cluster:
        yield cluster


@pytest.mark.parametrize("tokens", LENGTHS)
def test_its_answers_are_those_of_decode_alone(pair: Mixed, tokens: int) -> None:
    check_answers(pair, PATH, "vd", tokens)


def test_handoffs_are_counted_by_decode_alone(pair: Mixed) -> None:
    """Prefill can't tell a reader from a lease that ran out."""
    check_counted(pair, PATH)
    assert pair.replica("vp")["handoffs_completed"] is None
    assert pair.replica("vd")["handoffs_completed"] > 0


def test_nothing_listens_beyond_loopback(pair: Mixed) -> None:
    check_loopback(pair, "vp", "vd")


def test_clients_that_leave_take_no_blocks_along(pair: Mixed) -> None:
    check_leaving(pair, PATH, 12)
    check_answers(pair, PATH, "vd", 65)
    pair.wait("vLLM's blocks are free", lambda: kept(pair, "vd") == 0, 5)


def test_a_killed_prefill_replica_comes_back(pair: Mixed) -> None:
    """U14: its decode replica lives on, answers alone meanwhile, and takes blocks from the new
    process."""
    decode = pair.replica("vd")["pid"]
    pair.kill("vp")
    assert pair.completion(digits(65, 2), PATH, max_tokens=2).status_code in (502, 503)
    assert pair.completion(digits(65, 2), "vd", max_tokens=2).status_code == 200
    pair.wait("the pair is back", pair.ready, 150)
    check_answers(pair, PATH, "vd", 193)
    assert pair.replica("vd")["pid"] == decode


def kept(cluster: Mixed, replica: str) -> float:
    """The share of vLLM's blocks that some request holds."""
    port = cluster.record().plan.replica(replica).http_port
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    found = next(x for x in text.splitlines() if x.startswith("vllm:kv_cache_usage_perc"))
    return float(found.rsplit(" ", 1)[1])
