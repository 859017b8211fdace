"""vLLM and SGLang, each with itself and with the other, over `transport = "nixl"`: the decode
engine reads pages out of the prefill engine's memory, host to host.

Twice: as on CPUs, and with the host's memory treated as a device's, by all that runs on a GPU but
the GPU's own copies."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from agreement import Agreement
from e2e.prompts import exact_prompt
from engine import witness
from engine.faults import Faults
from engine.held import rounded_once
from engine.sglang_pairs import CHUNK_TOKENS, Fleet, check_text, over_nixl
from engine.vllm_pairs import COMPLETIONS, alone, check_at_rest, completion, until
from engines.replicas import Pair, contract_of, text_of
from engines.sglang_replicas import SglangProcess, needs_sglang
from engines.vllm_replicas import VllmProcess, needs_vllm

from pdctl.engines.session import DEVICE_ENV
from pdctl.topology.model import PAGE_TOKENS, Role

pytestmark = [pytest.mark.engine, pytest.mark.slow, needs_sglang, needs_vllm]

PAIRS = ("vllm>vllm", "vllm>sglang", "sglang>vllm", "sglang>sglang")
NAMES = ("vp4", "vd4", "sp4", "sd4")


@pytest.fixture(scope="module", params=["host", "device"])
def fleet(folder: Path, llama_dir: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """All compute in float32, prompts in chunks of 128 tokens; what each holds can be asked for."""
    contract, device = contract_of(llama_dir), request.param == "device"
    env = {**Faults(folder).environment, **witness.environment(folder), DEVICE_ENV: "host"}
    with ExitStack() as stack:

        def start(kind: type[VllmProcess], name: str, role: Role, **options: object) -> VllmProcess:
            made = kind(folder, name, role, llama_dir, contract, env=env, **options)
            return stack.enter_context(over_nixl(made, *NAMES, device=device))

        vllm = {"block_size": 64, "max_num_batched_tokens": CHUNK_TOKENS}
        vp = start(VllmProcess, "vp4", Role.PREFILL, **vllm)
        vd = start(VllmProcess, "vd4", Role.DECODE, **vllm)
        sp = start(SglangProcess, "sp4", Role.PREFILL, chunked_prefill_size=CHUNK_TOKENS)
        sd = start(SglangProcess, "sd4", Role.DECODE)
        for process in (sp, sd, vp, vd):
            process.await_ready()
        yield Fleet(vd, {"sglang": (sp, sd), "vllm": (vp, vd)})


@pytest.mark.parametrize("tokens", [51, 65, 129, 193, 700])
@pytest.mark.parametrize("name", PAIRS)
def test_text_through_a_pair_equals_text_of_one(
    fleet: Fleet, name: str, tokens: int, agreement: Agreement
) -> None:
    """R25, R31: streamed and not; every page is counted once, in the memory where it lay."""
    check_text(fleet, name, tokens, COMPLETIONS, agreement)
    for end in (fleet.pair(name).prefill, fleet.pair(name).decode):
        assert end.agent.ready.terms["transports"] == ["tcp", "nixl"]


@pytest.mark.parametrize("tokens", [65, 129, 193])
@pytest.mark.parametrize("name", PAIRS)
def test_decode_holds_prefills_numbers_rounded_once(
    folder: Path, llama_dir: Path, fleet: Fleet, name: str, tokens: int
) -> None:
    """R25: bit for bit, at a page's end, at two, and past three."""
    prompt = exact_prompt(llama_dir, tokens, seed=31)
    body = completion(tokens, salt=f"nixl {name}", prompt=prompt)
    rounded_once(folder, fleet.pair(name), body, tokens)


@pytest.mark.parametrize("tokens", [65, 66, 193])
@pytest.mark.parametrize("name", PAIRS)
def test_no_other_byte_of_decodes_memory_changes(
    faults: Faults, fleet: Fleet, name: str, tokens: int
) -> None:
    """R25, R26: all KV memory from before the first page beside that after the last one."""
    pair = fleet.pair(name)
    with faults.of("audit"):
        _, (status, answer) = pair.post(COMPLETIONS, completion(tokens, 40, salt=f"audit {name}"))
    assert status == 200, answer
    count = tokens - pair.decode.spec.recomputes_last_token
    blocks = -(-count // PAGE_TOKENS)
    assert faults.audited() == {"blocks": blocks, "filled": count, "strays": []}


@pytest.mark.parametrize("name", PAIRS)
def test_twelve_cancelled_at_random_moments_leave_nothing(fleet: Fleet, name: str) -> None:
    """R10, U17: both clients hang up, also while pages are read; the next is right."""
    pair, chance = fleet.pair(name), random.Random(11)
    for at in range(12):
        leg = pair.leg()
        body = completion(chance.randint(100, 700), at, salt=f"cancelled {name} {at}")
        legs = [
            pair.prefill.send(COMPLETIONS, pair.prefill.spec.prefill_body(body, leg)),
            pair.decode.send(COMPLETIONS, pair.decode.spec.decode_body(body, leg)),
        ]
        threading.Event().wait(chance.random() * 0.4)
        chance.shuffle(legs)
        hang_up(pair, leg.room, legs)
    check_next_is_right(pair, fleet)


def test_a_decode_that_is_killed_frees_what_prefill_held(fleet: Fleet) -> None:
    """R7: pages that it was reading are prefill's again."""
    pair = fleet.pair("vllm>sglang")
    leg, body = pair.leg(), completion(700, 4, salt="decode killed")
    decoded = pair.decode.send(COMPLETIONS, pair.decode.spec.decode_body(body, leg))
    prefill = pair.prefill.send(COMPLETIONS, pair.prefill.spec.prefill_body(body, leg))
    until(pair.prefill, lambda counters: counters.handoffs_active == 1)
    os.killpg(pair.decode.process.pid, signal.SIGKILL)
    prefill.close()
    decoded.close()
    check_at_rest(pair.prefill)
    check_next_is_right(fleet.pair("vllm>vllm"), fleet)


def check_next_is_right(pair: Pair, fleet: Fleet) -> None:
    """Nothing is left, and the pair's next answer is that of an engine alone."""
    check_at_rest(pair.prefill, pair.decode)
    body = completion(130, 77, salt="next")
    (prefilled, answer), (decoded, whole) = pair.post(COMPLETIONS, body)
    assert (prefilled, decoded) == (200, 200), (answer, whole)
    assert text_of(whole).strip() == alone(fleet.o, COMPLETIONS, body).strip()


def hang_up(pair: Pair, room: int, legs: list) -> None:
    for process in (pair.prefill, pair.decode):
        order = process.spec.abort(room)
        if order is not None:
            process.post(*order)
    for connection in legs:
        connection.close()
