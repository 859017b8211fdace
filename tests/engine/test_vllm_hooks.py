"""What goes wrong inside pdctl's hooks in vLLM's processes, and what they leave untouched."""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine.faults import Faults
from engine.vllm_pairs import COMPLETIONS, Four, alone, check_at_rest, completion, until
from engines.replicas import WAIT_S, Pair, text_of
from engines.vllm_replicas import PYTHON, needs_vllm

from pdctl.handoff.lease import DEAD_S
from pdctl.topology.model import PAGE_TOKENS

pytestmark = [pytest.mark.engine, needs_vllm]

BLOCK_TOKENS = 64
"""Of the decode replica."""


@pytest.fixture
def pair(four: Four) -> Pair:
    return four.pair("vllm>vllm")


def check_next_is_right(pair: Pair) -> None:
    check_at_rest(pair.prefill, pair.decode)
    body = completion(130, 77, salt="next")
    expected = alone(pair.decode, COMPLETIONS, body)
    (prefilled, _), (decoded, answer) = pair.post(COMPLETIONS, body)
    assert (prefilled, decoded) == (200, 200)
    assert text_of(answer) == expected


def told(pair: Pair, room: int) -> set[tuple[str, str]]:
    """(leg, cause) of every failure that either end told its agent."""
    for process in (pair.prefill, pair.decode):
        process.counters()
    failures = [*pair.prefill.agent.failures, *pair.decode.agent.failures]
    return {(failure.leg, failure.cause) for failure in failures if failure.room == room}


@pytest.mark.parametrize("name", ["vllm>vllm", "mlx>vllm"])
@pytest.mark.parametrize("tokens", [65, 66, 129, 130, 193, 194])
def test_no_other_byte_of_decode_s_memory_changes(
    four: Four, faults: Faults, name: str, tokens: int
) -> None:
    """R25, R26: all KV memory from before the first page beside that after the last one. At 65,
    129 and 193 tokens what travels fills its blocks, one token later it takes another block."""
    pair = four.pair(name)
    with faults.of("audit"):
        _, (status, answer) = pair.post(COMPLETIONS, completion(tokens, 40, salt=f"audit {name}"))
    assert status == 200, answer
    found = faults.audited()
    blocks = -(-(tokens - 1) // BLOCK_TOKENS)
    assert found == {"blocks": blocks, "filled": tokens - 1, "strays": []}


@pytest.mark.parametrize(
    ("fault", "legs"),
    [
        ("gather raises", {"prefill", "decode"}),
        ("PrefillLeg.start raises", {"prefill", "decode"}),
        ("DecodeLeg.start raises", {"decode"}),
        ("write raises", {"prefill", "decode"}),
    ],
)
def test_an_error_in_a_hook_fails_its_request_alone(
    pair: Pair, faults: Faults, fault: str, legs: set[str]
) -> None:
    """R34, R35: what the same engines compute for others is delivered; the agent is told."""
    body, leg = completion(150, 41, salt=fault), pair.leg(timeout_s=3.0)
    beside = {
        process: completion(150, 42, salt=f"beside {fault}")
        for process in (pair.prefill, pair.decode)
    }
    expected = [alone(process, COMPLETIONS, other) for process, other in beside.items()]
    with faults.of(fault), ThreadPoolExecutor(2) as pool:
        running = [pool.submit(p.post, COMPLETIONS, other) for p, other in beside.items()]
        _, (status, _) = pair.post(COMPLETIONS, body, leg)
        assert status == 500
        assert [text_of(future.result()[1]) for future in running] == expected
    assert {found for found, _ in told(pair, leg.room)} >= legs
    check_next_is_right(pair)


@pytest.mark.parametrize("fault", ["the leg is unreadable", "blocks are unusable"])
def test_an_error_in_vllm_s_scheduler_fails_its_request_alone(
    pair: Pair, faults: Faults, fault: str
) -> None:
    """R34: its engine would end on what a connector raises there."""
    with faults.of(fault):
        _, (status, _) = pair.post(COMPLETIONS, completion(150, 43, salt=fault), pair.leg(3.0))
        assert status == 500
    check_next_is_right(pair)


def test_a_release_that_fails_keeps_the_rest_of_the_ended(pair: Pair, faults: Faults) -> None:
    """R36: four prompts end while releasing one raises: each engine goes on, all blocks return."""
    bodies = [completion(100, 44 + seed, salt="release") for seed in range(4)]
    with faults.of("PrefillLeg.finish raises"), ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda b: pair.post(COMPLETIONS, b, pair.leg(3.0)), bodies))
    assert [prefilled for (prefilled, _), _ in answers] == [200] * 4
    check_next_is_right(pair)


def test_a_handoff_slower_than_its_lease_is_renewed_while_others_are_served(
    pair: Pair, faults: Faults
) -> None:
    """U3, R5, R11: blocks that take longer to fill than a silent peer is given hold up neither
    the handoff nor what decode computes meanwhile."""
    body, other = completion(1900, 48, salt="slow"), completion(60, 49, salt="quick")
    expected = alone(pair.decode, COMPLETIONS, body)
    begun = time.monotonic()
    with faults.of("write is slow"), ThreadPoolExecutor(1) as pool:
        slow = pool.submit(pair.post, COMPLETIONS, body)
        until(pair.decode, lambda c: c.handoffs_active == 1)
        assert pair.decode.post(COMPLETIONS, other)[0] == 200
        assert not slow.done()
        (prefilled, _), (decoded, answer) = slow.result(WAIT_S)
    assert (prefilled, decoded) == (200, 200), answer
    assert text_of(answer) == expected
    assert time.monotonic() - begun > DEAD_S
    assert until(pair.decode, lambda c: c.handoffs_active == 0).imported_tokens > PAGE_TOKENS


def test_what_pdctl_did_not_launch_is_left_alone() -> None:
    """R37: vLLM of the same environment, with every plug-in loaded, has nothing of pdctl in it;
    and the connector, loaded by somebody else, refuses to work."""
    program = """
import json, sys
from vllm.plugins import load_general_plugins
load_general_plugins()
ours = [name for name in sys.modules if name.partition(".")[0] == "pdctl"]
from pdctl.engines.vllm.session import Session
from pdctl.errors import UsageError
try:
    Session({}, 1)
    refused = ""
except UsageError as error:
    refused = error.message
print(json.dumps([ours, refused]))
"""
    done = subprocess.run(
        [PYTHON, "-c", program], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    ours, refused = json.loads(done.stdout.splitlines()[-1])
    assert ours == []
    assert "PDCTL_SOCKET" in refused
