"""How vLLM's requests and handoffs end before their time, and that nothing stays behind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import msgspec
import pytest
from agreement import Agreement, ranking
from engine.vllm_pairs import (
    COMPLETIONS,
    Four,
    alone,
    answered_alone,
    check_at_rest,
    completion,
    metric,
    until,
)
from engines.replicas import Pair, text_of
from engines.vllm_replicas import MODEL_NAME, needs_vllm
from tiny import digits

pytestmark = [pytest.mark.engine, needs_vllm]


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


def causes(pair: Pair, room: int) -> set[str]:
    for process in (pair.prefill, pair.decode):
        # an answer to this comes after what was told before
        process.counters()
    failures = [*pair.prefill.agent.failures, *pair.decode.agent.failures]
    return {failure.cause for failure in failures if failure.room == room}


def hang_up(connection: HTTPConnection) -> None:
    assert connection.sock is not None
    connection.sock.close()
    connection.close()


@pytest.mark.parametrize("garbage", [7, {}, {"room": "x"}, {"room": 1, "ticket": "t"}, None])
def test_what_is_no_leg_fails_alone(pair: Pair, garbage: Any) -> None:
    """R34: neither engine minds a field that it cannot read."""
    for process in (pair.prefill, pair.decode):
        body = {**completion(80, 1, salt="g"), "kv_transfer_params": {"pdctl": garbage}}
        status, answer = process.post(COMPLETIONS, body)
        assert status == 500, answer
    check_next_is_right(pair)


def test_a_forged_ticket_fails_both_legs(pair: Pair) -> None:
    """Nothing is reserved and nothing computed; the agent is told why."""
    leg = msgspec.structs.replace(pair.leg(), ticket="v1.1.forged")
    (prefilled, _), (decoded, _) = pair.post(COMPLETIONS, completion(90, 2, salt="f"), leg)
    assert (prefilled, decoded) == (500, 500)
    assert "ticket" in causes(pair, leg.room)
    check_next_is_right(pair)


def test_a_leg_of_other_replicas_fails(pair: Pair) -> None:
    """It is no end of that pair."""
    leg = msgspec.structs.replace(pair.leg(), prefill="x0", decode="x1")
    (prefilled, _), (decoded, _) = pair.post(COMPLETIONS, completion(90, 3, salt="o"), leg)
    assert (prefilled, decoded) == (500, 500)
    check_next_is_right(pair)


def test_prompts_that_differ_fail_by_name(pair: Pair) -> None:
    """R72: both legs compare the prompt's tokens; a wrong KV cache is never used."""
    leg = pair.leg()
    prefill = pair.prefill.send(
        COMPLETIONS, pair.prefill.spec.prefill_body(completion(90, 4, salt="a"), leg)
    )
    status, _ = pair.decode.post(
        COMPLETIONS, pair.decode.spec.decode_body(completion(90, 5, salt="a"), leg)
    )
    assert status == 500
    assert "tokens" in causes(pair, leg.room)
    prefill.close()
    check_next_is_right(pair)


def test_prompts_wait_for_the_budget_and_are_all_served(pair: Pair) -> None:
    """40 pages hold one such prompt at a time: the others wait, in order, and none is lost."""
    body = completion(2040, 6, salt="b", max_tokens=2)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: pair.post(COMPLETIONS, body), range(3)))
    assert {(a[0], b[0]) for a, b in answers} == {(200, 200)}
    check_next_is_right(pair)


def test_a_prompt_over_the_context_is_the_clients_mistake(pair: Pair) -> None:
    """U18: 400 on both legs, nothing begun."""
    (prefilled, _), (decoded, answer) = pair.post(COMPLETIONS, completion(2100, 7, salt="c"))
    assert (prefilled, decoded) == (400, 400)
    assert "2048" in answer["error"]["message"]
    check_next_is_right(pair)


def test_a_decode_leg_alone_ends_when_its_client_does(pair: Pair) -> None:
    """U2: it has no block before an offer, so there is nothing to lose."""
    body = pair.decode.spec.decode_body(completion(300, 8, salt="d"), pair.leg())
    waiting = pair.decode.send(COMPLETIONS, body)
    until(pair.decode, lambda c: c.handoffs_active == 1)
    hang_up(waiting)
    check_next_is_right(pair)


def test_a_decode_leg_whose_prefill_never_comes_fails_in_time(pair: Pair) -> None:
    """One deadline; the request is failed, not recomputed."""
    leg = pair.leg(timeout_s=1.0)
    body = pair.decode.spec.decode_body(completion(300, 9, salt="d"), leg)
    status, _ = pair.decode.post(COMPLETIONS, body)
    assert status == 500
    assert causes(pair, leg.room) & {"expired", "protocol", "peer_lost", "cancelled"}
    check_next_is_right(pair)


def test_a_prefill_leg_whose_decode_never_comes_gives_its_pages_back(pair: Pair) -> None:
    """U1, U3: its answer has long been given; the pages go at the deadline."""
    leg = pair.leg(timeout_s=1.0)
    body = pair.prefill.spec.prefill_body(completion(300, 10, salt="p"), leg)
    status, _ = pair.prefill.post(COMPLETIONS, body)
    assert status == 200
    until(pair.prefill, lambda c: c.buffer_bytes_used == 0)
    assert causes(pair, leg.room) == {"expired"}
    check_next_is_right(pair)


def test_a_prefill_leg_that_was_answered_is_released_on_order(pair: Pair) -> None:
    """U2: decode refused before it dialled; the pages go at once, not at the deadline."""
    leg, before = pair.leg(), pair.prefill.counters().handoffs_cancelled
    body = pair.prefill.spec.prefill_body(completion(300, 13, salt="o"), leg)
    assert pair.prefill.post(COMPLETIONS, body)[0] == 200
    assert pair.prefill.counters().buffer_bytes_used > 0
    path, order = pair.prefill.spec.release(leg.room) or ("", {})
    assert pair.prefill.post(path, order)[0] == 200
    found = until(pair.prefill, lambda c: c.buffer_bytes_used == 0)
    assert found.handoffs_cancelled == before + 1
    check_next_is_right(pair)


def test_both_clients_hang_up_in_mid_prefill(pair: Pair) -> None:
    """U1, U4, U5: each end frees its own."""
    leg, body = pair.leg(), completion(2000, 11, salt="h")
    prefill = pair.prefill.send(COMPLETIONS, pair.prefill.spec.prefill_body(body, leg))
    until(pair.prefill, lambda c: c.requests_active == 1)
    decode = pair.decode.send(COMPLETIONS, pair.decode.spec.decode_body(body, leg))
    until(pair.decode, lambda c: c.requests_active == 1)
    hang_up(prefill)
    hang_up(decode)
    check_next_is_right(pair)


def test_a_client_that_hangs_up_while_it_decodes_frees_the_blocks(pair: Pair) -> None:
    """U34."""
    leg, body = pair.leg(), completion(100, 12, salt="m", max_tokens=1500, stream=True)
    prefill = pair.prefill.send(COMPLETIONS, pair.prefill.spec.prefill_body(body, leg))
    decode, response = pair.decode.open(COMPLETIONS, pair.decode.spec.decode_body(body, leg))
    assert response.readline().startswith(b"data: ")
    prefill.getresponse().read()
    prefill.close()
    hang_up(decode)
    check_next_is_right(pair)


def test_forty_cancelled_at_random_moments_leave_nothing(pair: Pair) -> None:
    """R19, U1: at each stage, on one end or on both; the next request is right."""

    def one(index: int) -> None:
        leg = pair.leg(timeout_s=5.0)
        body = completion(65 + 47 * (index % 20), index, salt="r", max_tokens=40, stream=True)
        legs = [
            pair.prefill.send(COMPLETIONS, pair.prefill.spec.prefill_body(body, leg)),
            pair.decode.send(COMPLETIONS, pair.decode.spec.decode_body(body, leg)),
        ]
        threading.Event().wait(0.01 * (index % 29))
        for connection in legs[index % 2 :] if index % 3 else legs:
            hang_up(connection)
        legs[0].close()
        legs[1].close()

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(one, range(40)))
    check_next_is_right(pair)


def test_requests_that_decode_preempts_go_on_right(pair: Pair, agreement: Agreement) -> None:
    """Eight of 320 tokens grow by 384 each in 34 blocks: some lose their imported KV, and
    compute it again. Text may leave what decode computes alone at a near-tie only."""
    long = {"max_tokens": 384, "ignore_eos": True, **ranking(COMPLETIONS)}
    bodies = [completion(320, 20 + i, salt="preempt", **long) for i in range(8)]
    before = metric(pair.decode, "vllm:num_preemptions_total")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: pair.post(COMPLETIONS, body), bodies))
    assert metric(pair.decode, "vllm:num_preemptions_total") > before
    for index, (body, (_, (_, answer))) in enumerate(zip(bodies, answers, strict=True)):
        own = answered_alone(pair.decode, COMPLETIONS, body)
        agreement.check("vllm>vllm, preempted", f"prompt {index}", own, answer)
    check_next_is_right(pair)


def test_several_prompts_in_one_request_fail_cleanly(pair: Pair) -> None:
    """A room is for one prompt: the second is refused, and the engines live."""
    body = {
        "model": MODEL_NAME,
        "prompt": [digits(80, 1), digits(90, 2)],
        "max_tokens": 1,
        "kv_transfer_params": pair.prefill.spec.decode_body({}, pair.leg(1.0))[
            "kv_transfer_params"
        ],
    }
    status, _ = pair.prefill.post(COMPLETIONS, body)
    assert status == 500
    check_next_is_right(pair)
