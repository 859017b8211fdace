"""vLLM beside MLX in one cluster: what clients are told, what is secret, what at `up` is caught."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from e2e.asking import (
    ask,
    check_error,
    check_failed_handoff,
    check_next_is_right,
    check_over_buffer,
    check_over_context,
    check_wrong_kv_fails_up,
)
from e2e.crowd import Crowd, check_leaving, counted
from e2e.mixed import BUFFER_TOKENS, CONTEXT, Mixed
from e2e.test_soak import clear_answers
from engines.vllm_replicas import needs_vllm

from pdctl.engines.channel import RUN_ENV

pytestmark = [pytest.mark.engine, needs_vllm]

PAIRS = ("vp>vd", "vp>md", "mp>vd")
LOAD_S = 8.0
WRONG = (
    "write zeroes",
    "write swaps K and V",
    "write leaves out a page",
    "write shifts layers",
    "write rotates K",
)


def test_the_key_is_in_no_process_s_environment_or_arguments(mixed: Mixed) -> None:
    """Of vLLM's three processes neither; only the one that owns the KV memory is ever told it."""
    key = (mixed.state / "pdctl" / mixed.name / "key").read_text().strip()
    assert len(bytes.fromhex(key)) == 32
    found = [process for name in ("vp", "vd", "mp", "md") for process in mixed.processes(name)]
    found.append(psutil.Process(mixed.ps()["router"]["pid"]))
    for process in found:
        for file in ("environ", "cmdline"):
            assert key.encode() not in Path(f"/proc/{process.pid}/{file}").read_bytes()
    for name in ("vp", "vd"):
        own = [process for process in mixed.processes(name) if "VLLM::" in process.name()]
        assert len(own) == 2
        for pid in (mixed.replica(name)["pid"], *(process.pid for process in own)):
            started = mixed.faults.started_with(pid)
            assert RUN_ENV in started
            assert key not in started


@pytest.mark.parametrize("path", PAIRS)
def test_a_prompt_over_the_buffer_is_refused_before_prefill(mixed: Mixed, path: str) -> None:
    """R40."""
    check_over_buffer(mixed, path, BUFFER_TOKENS)


@pytest.mark.parametrize("path", PAIRS)
def test_a_prompt_over_the_context_is_refused_by_parameter(mixed: Mixed, path: str) -> None:
    """U18."""
    check_over_context(mixed, path, CONTEXT)


@pytest.mark.parametrize("path", PAIRS)
def test_a_prompt_of_one_token_needs_no_page(mixed: Mixed, path: str) -> None:
    """R27: it is recomputed whole, and what follows is right."""
    response = ask(mixed, path, 1)
    assert response.status_code == 200, response.text
    alone = ask(mixed, path.partition(">")[2], 1)
    assert response.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
    check_next_is_right(mixed, path)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fault", "words"),
    [
        ("vp>vd", "write raises", ('replica "vd"', "could not be written")),
        ("mp>vd", "write raises", ("vd", "could not be written")),
        ("vp>vd", "gather raises", ("the copy of a layer broke",)),
        ("vp>md", "gather raises", ("the copy of a layer broke",)),
        ("vp>vd", "DecodeLeg.start raises", ('decode replica "vd"', "broke")),
        ("vp>md", "PrefillLeg.start raises", ("prefill", "broke")),
    ],
)
def test_a_failed_handoff_is_told_by_leg_replica_and_cause(
    mixed: Mixed, path: str, fault: str, words: tuple[str, ...], stream: bool
) -> None:
    """R34, R67, R72: vLLM's own answer is a bare 500; that request fails alone, and is never
    computed by decode in silence."""
    began = "start" not in fault
    check_failed_handoff(mixed, path, fault, words, began=began, stream=stream)


@pytest.fixture(scope="module")
def answers(mixed: Mixed, checkpoints: dict[str, Path]) -> dict[str, str]:
    return clear_answers(mixed, checkpoints["llama"], "md")


def test_sixteen_clients_on_three_pairs_are_counted_exactly(
    mixed: Mixed, answers: dict[str, str]
) -> None:
    """U3, U7, U17: every answer is right, and every handoff and token is counted once."""
    before, clients = counted(mixed, PAIRS), Crowd(mixed, answers, PAIRS)
    clients.run(LOAD_S)
    clients.check()
    mixed.wait("nothing in flight", mixed.idle, 15)
    after = counted(mixed, PAIRS)
    for path in PAIRS:
        served = clients.served[path]
        assert served > 0
        assert after[path] - before[path] == {
            "handoffs_completed": served,
            "imported_tokens": clients.prompted[path] - served,
        }


def test_clients_that_leave_at_random_moments_take_nothing_with_them(
    mixed: Mixed, answers: dict[str, str]
) -> None:
    """U1, U4, U5, U34, R19: the others' answers are right, no handoff fails, nothing is left."""
    check_leaving(mixed, answers, PAIRS, LOAD_S)


@pytest.mark.parametrize(
    ("fault", "pair"), [*((fault, "mp1>vd") for fault in WRONG), ("gather zeroes", "vp>md1")]
)
def test_wrong_kv_fails_the_up_that_brings_it(mixed: Mixed, fault: str, pair: str) -> None:
    """U13, U16: KV that is zero, K and V swapped, one page missing, layers shifted by one, RoPE's
    theta off: the canary catches it: exit 5, the pair is named, the cluster is as it was."""
    check_wrong_kv_fails_up(mixed, fault, pair)
    check_next_is_right(mixed, "vp>vd")


def test_wrong_kv_keeps_a_started_replica_out(mixed: Mixed) -> None:
    """U12, U13, U16: the same canary, each time that an end of the pair starts."""
    with mixed.faults.of("write rotates K"):
        done = mixed.pdctl("restart", mixed.topology, "mp", check=False)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "mp>vd failed its canary" in done.stderr
        assert "the KV cache is not its own" in done.stderr
        check_error(ask(mixed, "mp>vd", 90), 503, "mp>vd is not ready", "the KV cache")
    mixed.wait("every pair ready", mixed.ready)
    check_next_is_right(mixed, "mp>vd")


def test_an_engine_with_another_theta_than_its_file_is_not_launched(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Effective values count: the field and both values are named, and all is rolled back."""
    cluster = Mixed(tmp_path, checkpoints["llama"], "vp md")
    with cluster.faults.of("theta"):
        done = cluster.pdctl("up", cluster.topology, "--detach", check=False)
    assert done.returncode == 5, done.stdout + done.stderr
    told = 'replica "vp" failed: positions.rope_theta should be 100000.0, the engine has 10000.0'
    assert told in done.stderr
    assert list(cluster.leftovers()) == []
