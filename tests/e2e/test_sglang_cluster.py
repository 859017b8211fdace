"""All three engines in one cluster, launched as a user does: what clients of a pair with an end
of SGLang are told."""

from __future__ import annotations

import threading
from pathlib import Path

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
from e2e.conftest import THREE_BUFFER_TOKENS, THREE_CONTEXT
from e2e.crowd import check_leaving
from e2e.mixed import Mixed
from e2e.test_soak import clear_answers
from engines.sglang_replicas import needs_sglang
from engines.vllm_replicas import needs_vllm

pytestmark = [pytest.mark.engine, needs_sglang, needs_vllm]

PAIRS = ("sp>sd", "sp>md", "vp>sd")
LOAD_S = 8.0
HTTP_IDLE_S = 6.0
"""SGLang's server closes a connection after 5."""


@pytest.mark.parametrize("tokens", [65, 700])
def test_every_pair_with_an_end_of_sglang_answers_alike(three: Mixed, tokens: int) -> None:
    """S7, S9, S10: each went through its canary at `up`; SGLang's own pair has no other engine
    to compare with."""
    fields = {"cache_salt": f"alike {tokens}", "max_tokens": 12}
    alone = ask(three, "md", tokens, **fields).json()["choices"][0]["text"]
    for path in PAIRS:
        answer = ask(three, path, tokens, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-pdctl-path"] == path
        assert answer.json()["choices"][0]["text"].strip() == alone.strip()


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("sp>sd", "logprobs", 2),
        ("vp>sd", "min_tokens", 2),
        ("vp>sd", "regex", "[0-9]+"),
        ("sp>md", "echo", True),
    ],
)
def test_what_a_pair_cannot_honour_is_refused_before_it_is_scheduled(
    three: Mixed, path: str, field: str, value: object
) -> None:
    """R66: with the parameter and the pair."""
    answer = ask(three, path, 40, **{field: value})
    check_error(answer, 400, path)
    assert answer.json()["error"]["param"] == field


def test_half_of_sglang_answers_nothing_alone(three: Mixed) -> None:
    """DESIGN §7: no path leads to it."""
    check_error(ask(three, "sd", 40), 400, "sp>sd")


@pytest.mark.parametrize("path", ["sp>sd", "sp>md"])
def test_a_prompt_over_the_buffer_is_refused_before_prefill(three: Mixed, path: str) -> None:
    """R40."""
    check_over_buffer(three, path, THREE_BUFFER_TOKENS)


@pytest.mark.parametrize("path", PAIRS)
def test_a_prompt_over_the_context_is_refused_by_parameter(three: Mixed, path: str) -> None:
    """U18: and decode makes up no text."""
    check_over_context(three, path, THREE_CONTEXT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fault", "words"),
    [
        ("vp>sd", "write raises", ("sd", "could not be written")),
        ("sp>md", "gather raises", ("the copy of a layer broke",)),
        ("vp>sd", "DecodeLeg.start raises", ('decode replica "sd"', "broke")),
        ("sp>md", "PrefillLeg.start raises", ('prefill replica "sp"', "broke")),
    ],
)
def test_a_failed_handoff_is_told_by_leg_replica_and_cause(
    three: Mixed, path: str, fault: str, words: tuple[str, ...], stream: bool
) -> None:
    """R34, R67, R72: the scheduler lives on."""
    pids = {name: three.replica(name)["pid"] for name in ("sp", "sd")}
    check_failed_handoff(three, path, fault, words, began="start" not in fault, stream=stream)
    assert {name: three.replica(name)["pid"] for name in pids} == pids


def test_clients_that_leave_at_random_moments_take_nothing_with_them(
    three: Mixed, checkpoints: dict[str, Path]
) -> None:
    """U1, U4, U5, U7, U34, R19: the others' answers are right, no handoff fails, nothing is
    left."""
    check_leaving(three, clear_answers(three, checkpoints["llama"], "md"), PAIRS, LOAD_S)


@pytest.mark.parametrize("fault", ["write zeroes", "write shifts layers"])
def test_wrong_kv_in_sglang_fails_the_up_that_brings_it(three: Mixed, fault: str) -> None:
    """U13, U16: exit 5, the pair is named, the cluster is as it was."""
    check_wrong_kv_fails_up(three, fault, "mp1>sd")
    check_next_is_right(three, "vp>sd")


def test_the_next_request_after_hours_of_idleness_is_right(three: Mixed) -> None:
    """U21: SGLang's clocks are three hours on, and longer has passed than its HTTP server keeps
    a connection: the first request of each pair is right, the data connections are new ones."""
    three.wait("nothing in flight", three.idle, 15)
    pids = [replica["pid"] for replica in three.status()["replicas"]]
    dialled = {name: link.dialled for name, link in three.links.items()}
    three.faults.set_ahead(3 * 3600.0)
    threading.Event().wait(HTTP_IDLE_S)
    for path in PAIRS:
        answer = ask(three, path, 130, cache_salt="rested")
        assert answer.status_code == 200, answer.text
        assert "x-pdctl-retried" not in answer.headers
        check_next_is_right(three, path)
    assert all(link.dialled > dialled[name] for name, link in three.links.items())
    assert [replica["pid"] for replica in three.status()["replicas"]] == pids
