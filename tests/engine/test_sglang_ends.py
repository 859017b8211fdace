"""How SGLang's requests and handoffs end before their time, and that nothing stays behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine.sglang_pairs import CHUNK_TOKENS, Fleet, check_next_is_right
from engine.vllm_pairs import COMPLETIONS, check_at_rest, completion, until
from engines.replicas import Pair, Process, contract_of, text_of
from engines.sglang_replicas import SglangProcess, needs_sglang

from pdctl.engines.interface import Leg
from pdctl.topology.model import PAGE_TOKENS, Role

pytestmark = [pytest.mark.engine, needs_sglang]

BUFFER_PAGES = 40
"""Of prefill: one context of 2048 tokens takes 32."""
MEMORY_TOKENS = 36 * PAGE_TOKENS
"""Of decode: one long prompt, and the 512 tokens that SGLang reserves for its answer."""
LONGEST = MEMORY_TOKENS - 512


@pytest.fixture(scope="module")
def fleet(folder: Path, llama_dir: Path) -> Iterator[Fleet]:
    contract = contract_of(llama_dir)
    with ExitStack() as stack:
        sp, sd = (
            stack.enter_context(
                SglangProcess(
                    *(folder, name, role, llama_dir, contract),
                    buffer_bytes=BUFFER_PAGES * contract.page_bytes,
                    **options,
                )
            )
            for name, role, options in (
                ("sp2", Role.PREFILL, {"chunked_prefill_size": CHUNK_TOKENS}),
                ("sd2", Role.DECODE, {"max_total_tokens": MEMORY_TOKENS}),
            )
        )
        mo = stack.enter_context(Process(folder, "mo2", Role.BOTH, llama_dir, contract))
        sp.await_ready()
        sd.await_ready()
        yield Fleet(mo, {"sglang": (sp, sd)})


@pytest.fixture
def pair(fleet: Fleet) -> Pair:
    return fleet.pair("sglang>sglang")


def causes(pair: Pair, room: int) -> set[str]:
    for process in (pair.prefill, pair.decode):
        # an answer to this comes after what was told before
        process.counters()
    failures = [*pair.prefill.agent.failures, *pair.decode.agent.failures]
    return {failure.cause for failure in failures if failure.room == room}


def abort(process: Process, leg: Leg) -> None:
    """As the router does it."""
    order = process.spec.abort(leg.room)
    assert order is not None
    status, _ = process.post(*order)
    assert status == 200


def leg_body(process: Process, body: dict[str, Any], leg: Leg) -> dict[str, Any]:
    bodies = process.spec.prefill_body, process.spec.decode_body
    return bodies[process.role is Role.DECODE](body, leg)


def send(process: Process, body: dict[str, Any], leg: Leg) -> HTTPConnection:
    return process.send(COMPLETIONS, leg_body(process, body, leg))


def answered(connection: HTTPConnection) -> int:
    """The status of the whole answer."""
    try:
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


@pytest.mark.parametrize("garbage", [7, {}, {"room": "x"}, {"room": 1, "ticket": "t"}, None])
@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_what_is_no_leg_is_refused_and_the_engine_lives(
    fleet: Fleet, pair: Pair, garbage: Any, host: str | None
) -> None:
    """R34: SGLang's decode would end on a request that names no prefill server."""
    for process in (pair.prefill, pair.decode):
        body = completion(80, 1, salt="g", custom_params={"pdctl": garbage}, bootstrap_room=5)
        status, answer = process.post(COMPLETIONS, {**body, "bootstrap_host": host})
        assert status == 400, answer
    check_next_is_right(pair, fleet)


@pytest.mark.parametrize("field", ["bootstrap_host", "bootstrap_room", "custom_params"])
def test_a_leg_that_lacks_a_field_is_refused(fleet: Fleet, pair: Pair, field: str) -> None:
    """R34: what is there of it is right."""
    leg = pair.leg()
    for process in (pair.prefill, pair.decode):
        make = (
            process.spec.decode_body if process.role is Role.DECODE else process.spec.prefill_body
        )
        body = make(completion(80, 1, salt="l"), leg)
        del body[field]
        status, answer = process.post(COMPLETIONS, body)
        assert status == 400, answer
    check_next_is_right(pair, fleet)


def test_a_leg_without_a_bootstrap_port_is_served(fleet: Fleet, pair: Pair) -> None:
    """SGLang would dial it; the leg itself says where the sender is."""
    leg, body = pair.leg(), completion(80, 1, salt="p")
    legs = []
    for process in (pair.prefill, pair.decode):
        made = leg_body(process, body, leg)
        del made["bootstrap_port"]
        legs.append(process.send(COMPLETIONS, made))
    assert [answered(connection) for connection in legs] == [200, 200]
    check_next_is_right(pair, fleet)


def test_a_forged_ticket_fails_both_legs(fleet: Fleet, pair: Pair) -> None:
    """Nothing is reserved and nothing computed; the agent and the caller are told why."""
    leg = msgspec.structs.replace(pair.leg(), ticket="v1.1.forged")
    (prefilled, answer), (decoded, _) = pair.post(COMPLETIONS, completion(90, 2, salt="f"), leg)
    assert (prefilled, decoded) == (500, 500)
    assert "ticket" in causes(pair, leg.room)
    said = msgspec.json.encode(answer)
    assert pair.prefill.spec.error_message(500, said)[1] == "ticket"
    check_next_is_right(pair, fleet)


def test_a_leg_of_other_replicas_fails(fleet: Fleet, pair: Pair) -> None:
    """It is no end of that pair."""
    leg = msgspec.structs.replace(pair.leg(), prefill="x0", decode="x1")
    (prefilled, _), (decoded, _) = pair.post(COMPLETIONS, completion(90, 3, salt="o"), leg)
    assert (prefilled, decoded) == (500, 500)
    check_next_is_right(pair, fleet)


def test_prompts_that_differ_fail_by_name(fleet: Fleet, pair: Pair) -> None:
    """R72: both legs compare the prompt's tokens; a wrong KV cache is never used."""
    leg = pair.leg()
    prefill = send(pair.prefill, completion(90, 4, salt="a"), leg)
    other = pair.decode.spec.decode_body(completion(90, 5, salt="a"), leg)
    status, _ = pair.decode.post(COMPLETIONS, other)
    assert (status, answered(prefill)) == (500, 500)
    assert "tokens" in causes(pair, leg.room)
    check_next_is_right(pair, fleet)


def test_prompts_wait_for_the_budget_and_are_all_served(fleet: Fleet, pair: Pair) -> None:
    """R41, U9: prefill's pages and decode's memory hold one such prompt at a time: the others
    wait, in order, and none is lost."""
    body = completion(LONGEST, 6, salt="b", max_tokens=2)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: pair.post(COMPLETIONS, body), range(3)))
    assert {(a[0], b[0]) for a, b in answers} == {(200, 200)}
    check_next_is_right(pair, fleet)


def test_a_prompt_over_the_context_is_the_clients_mistake(fleet: Fleet, pair: Pair) -> None:
    """U18: 400 on both legs, nothing begun."""
    (prefilled, _), (decoded, answer) = pair.post(COMPLETIONS, completion(2100, 7, salt="c"))
    assert (prefilled, decoded) == (400, 400)
    assert "2048" in msgspec.json.encode(answer).decode()
    check_next_is_right(pair, fleet)


def test_a_prompt_that_decode_could_never_hold_is_refused_at_once(fleet: Fleet, pair: Pair) -> None:
    """U9, R40: SGLang would wait for memory that it never has."""
    leg = pair.leg(timeout_s=5.0)
    body = pair.decode.spec.decode_body(completion(LONGEST + 1, 7, salt="n"), leg)
    status, answer = pair.decode.post(COMPLETIONS, body)
    assert status == 400
    said, cause = pair.decode.spec.error_message(400, msgspec.json.encode(answer))
    assert str(LONGEST) in said
    assert cause == "over_budget"
    check_next_is_right(pair, fleet)


def test_a_decode_leg_alone_ends_when_it_is_aborted(fleet: Fleet, pair: Pair) -> None:
    """U2: it has no block before an offer, so there is nothing to lose."""
    leg = pair.leg()
    waiting = send(pair.decode, completion(300, 8, salt="d"), leg)
    until(pair.decode, lambda c: c.handoffs_active == 1)
    abort(pair.decode, leg)
    assert answered(waiting) == 500
    check_next_is_right(pair, fleet)


def test_legs_whose_other_half_never_comes_fail_in_time(fleet: Fleet, pair: Pair) -> None:
    """R6, U1, U3: one deadline on either end; pages go with it."""
    for process in (pair.prefill, pair.decode):
        leg = pair.leg(timeout_s=1.0)
        assert answered(send(process, completion(300, 9, salt="d"), leg)) == 500
        assert causes(pair, leg.room) <= {"expired", "protocol", "peer_lost", "cancelled"}
        assert causes(pair, leg.room)
        until(pair.prefill, lambda c: c.buffer_bytes_used == 0)
    check_next_is_right(pair, fleet)


def test_an_abort_in_mid_prefill_frees_both_ends(fleet: Fleet, pair: Pair) -> None:
    """U1, U4, U5: between two chunks of a long prompt."""
    leg, body = pair.leg(), completion(1700, 11, salt="h")
    legs = [send(process, body, leg) for process in (pair.prefill, pair.decode)]
    until(pair.decode, lambda c: c.host_bytes > 0 and c.handoffs_active == 1)
    for process in (pair.prefill, pair.decode):
        abort(process, leg)
    check_at_rest(pair.prefill, pair.decode)
    assert {answered(connection) for connection in legs} <= {200, 400, 500}
    check_next_is_right(pair, fleet)


def test_an_abort_while_it_decodes_frees_its_blocks(fleet: Fleet, pair: Pair) -> None:
    """U34."""
    leg, body = pair.leg(), completion(100, 12, salt="m", max_tokens=1500, stream=True)
    prefill = send(pair.prefill, body, leg)
    decode = send(pair.decode, body, leg)
    response = decode.getresponse()
    assert response.readline().startswith(b"data: ")
    assert answered(prefill) == 200
    abort(pair.decode, leg)
    response.read()
    decode.close()
    check_next_is_right(pair, fleet)


def test_forty_cancelled_at_random_moments_leave_nothing(fleet: Fleet, pair: Pair) -> None:
    """R10, R15, R19, U1, U7: at each stage, on one end or on both; the next request is right."""

    def one(index: int) -> None:
        leg = pair.leg()
        body = completion(65 + 47 * (index % 20), index, salt="r", max_tokens=40, stream=True)
        legs = [send(process, body, leg) for process in (pair.prefill, pair.decode)]
        threading.Event().wait(0.02 * (index % 29))
        ended = [(pair.prefill, legs[0]), (pair.decode, legs[1])]
        for process, connection in ended[index % 2 :] if index % 3 else ended:
            abort(process, leg)
            connection.close()
        for connection in legs:
            connection.close()

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(one, range(40)))
    check_next_is_right(pair, fleet)


def test_requests_that_decode_retracts_go_on_right(fleet: Fleet, pair: Pair) -> None:
    """U9: six of 200 tokens grow by 300 each in 34 blocks: some lose their blocks to others,
    keep their KV beside them, and go on."""
    bodies = [
        completion(200, 20 + i, salt="retract", max_tokens=300, ignore_eos=True) for i in range(6)
    ]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda body: pair.post(COMPLETIONS, body), bodies))
    assert [(a[0], b[0]) for a, b in answers] == [(200, 200)] * 6
    assert [b[1]["usage"]["completion_tokens"] for _, b in answers] == [300] * 6
    check_next_is_right(pair, fleet)


def test_a_hundred_in_a_row_are_all_right(fleet: Fleet, pair: Pair) -> None:
    """U17: rows and blocks are used again and again."""
    for index in range(100):
        body = completion(40 + 7 * (index % 30), index % 10, salt=f"row {index}", max_tokens=4)
        (prefilled, answer), (decoded, whole) = pair.post(COMPLETIONS, body)
        assert (prefilled, decoded) == (200, 200), (index, answer, whole)
        own = fleet.o.post(COMPLETIONS, {**body, "cache_salt": "alone"})[1]
        assert text_of(whole).strip() == text_of(own).strip(), index
    check_at_rest(pair.prefill, pair.decode)
