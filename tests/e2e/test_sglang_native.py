"""S8: SGLang's own NIXL backend between two replicas on CPUs, launched as a user does. MLX, an
ordinary replica beside them, computes the texts that theirs are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
from engines.sglang_replicas import PYTHON, needs_sglang
from tiny import digits

pytestmark = [pytest.mark.engine, pytest.mark.slow, needs_sglang, needs_nixl(PYTHON)]

PATH = "sp>sd"


@pytest.fixture(scope="module")
def pair(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    folder = tmp_path_factory.mktemp("native")
    options = {"context_length": 2048, "handoff": NATIVE}
    with Mixed(folder, checkpoints["llama"], "sp sd mo", **options) as cluster:
        yield cluster


@pytest.mark.parametrize("tokens", LENGTHS)
def test_its_answers_are_those_of_another_engine_alone(pair: Mixed, tokens: int) -> None:
    check_answers(pair, PATH, "mo", tokens)


def test_handoffs_are_counted_at_both_ends(pair: Mixed) -> None:
    check_counted(pair, PATH)
    ends = [pair.replica(name)["handoffs_completed"] for name in ("sp", "sd")]
    assert ends[0] == ends[1] > 0


def test_nothing_listens_beyond_loopback(pair: Mixed) -> None:
    check_loopback(pair, "sp", "sd")


def test_clients_that_leave_take_nothing_along(pair: Mixed) -> None:
    check_leaving(pair, PATH, 12)
    check_answers(pair, PATH, "mo", 65)


def test_a_killed_prefill_replica_comes_back(pair: Mixed) -> None:
    """U14: its decode replica lives on and takes pages from the new process."""
    decode = pair.replica("sd")["pid"]
    pair.kill("sp")
    assert pair.completion(digits(65, 2), PATH, max_tokens=2).status_code in (502, 503)
    pair.wait("the pair is back", pair.ready, 150)
    check_answers(pair, PATH, "mo", 193)
    assert pair.replica("sd")["pid"] == decode
