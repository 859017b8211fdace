"""How requests and processes end before their time, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from typing import Any

import pytest
from engine.conftest import Trio, trio
from engines.replicas import SPEC, WAIT_S, Pair, Process, text_of
from tiny import digits

from pdctl.handoff.counters import Counters
from pdctl.topology.model import ComputeDtype, OnFailure, Role

pytestmark = pytest.mark.engine

COMPLETIONS = "/v1/completions"


def ask(tokens: int, seed: int = 0, **fields: Any) -> dict[str, Any]:
    prompt = digits(tokens, seed)
    return {"prompt": prompt, "max_tokens": 8, "temperature": 0, "pdctl_cache": False, **fields}


def until(process: Process, holds: Callable[[Counters], bool]) -> Counters:
    """Polls the counters, as the agent does, until they say so."""
    deadline = time.monotonic() + WAIT_S
    while not holds(found := process.counters()):
        assert time.monotonic() < deadline, found
    return found


def idle(counters: Counters) -> bool:
    held = (counters.handoffs_active, counters.requests_active, counters.buffer_bytes_used)
    return held == (0, 0, 0) and counters.waiters == 0


def check_next_is_right(trio: Trio) -> None:
    for process in (trio.pair.prefill, trio.pair.decode):
        until(process, idle)
    body = ask(130, seed=77)
    _, alone = trio.alone.post(COMPLETIONS, body)
    (prefilled, _), (decoded, answer) = trio.pair.post(COMPLETIONS, body)
    assert (prefilled, decoded) == (200, 200)
    assert text_of(answer) == text_of(alone)


def status_of(connection: HTTPConnection) -> int:
    try:
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_room_is_aborted_while_it_decodes(llama: Trio) -> None:
    """R15: the abort answers that it ended something, once; the stream ends in an error."""
    leg = llama.pair.leg()
    prefill = llama.pair.prefill.send(COMPLETIONS, SPEC.prefill_body(ask(100), leg))
    body = SPEC.decode_body(ask(100, max_tokens=1500, stream=True), leg)
    connection, response = llama.pair.decode.open(COMPLETIONS, body)
    assert status_of(prefill) == 200
    assert response.readline().startswith(b"data: ")
    abort = SPEC.abort(leg.room)
    assert abort is not None
    assert llama.pair.decode.post(*abort) == (200, {"aborted": True})
    rest = response.read().decode()
    connection.close()
    assert '"code": "cancelled"' in rest
    assert "[DONE]" not in rest
    assert llama.pair.decode.post(*abort) == (200, {"aborted": False})
    check_next_is_right(llama)


def test_a_decode_leg_alone_is_aborted_while_it_waits(llama: Trio) -> None:
    """The prefill leg never comes; what waits for it ends with the abort."""
    leg = llama.pair.leg()
    waiting = llama.pair.decode.send(COMPLETIONS, SPEC.decode_body(ask(100), leg))
    until(llama.pair.decode, lambda c: c.handoffs_active == 1)
    llama.pair.decode.post("/pdctl/abort", {"room": leg.room})
    response = waiting.getresponse()
    assert response.status == 502
    assert json.loads(response.read())["error"]["code"] == "cancelled"
    waiting.close()
    check_next_is_right(llama)


def test_a_prefill_leg_alone_is_aborted_when_its_pages_are_ready(llama: Trio) -> None:
    """U4, U5: everything was computed, and nobody fetches it."""
    leg = llama.pair.leg()
    waiting = llama.pair.prefill.send(COMPLETIONS, SPEC.prefill_body(ask(700), leg))
    until(llama.pair.prefill, lambda c: c.buffer_bytes_used > 0)
    llama.pair.prefill.post("/pdctl/abort", {"room": leg.room})
    assert status_of(waiting) == 502
    check_next_is_right(llama)


def test_an_abort_that_overtakes_its_leg_still_ends_it(llama: Trio) -> None:
    """R16: the room is not created after its end."""
    leg = llama.pair.leg()
    assert llama.pair.prefill.post("/pdctl/abort", {"room": leg.room})[1] == {"aborted": False}
    status, answer = llama.pair.prefill.post(COMPLETIONS, SPEC.prefill_body(ask(80), leg))
    assert (status, answer["error"]["code"]) == (502, "cancelled")
    check_next_is_right(llama)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_hangs_up_ends_its_request(llama: Trio, streamed: bool) -> None:
    """U34: also one that is not streamed, which the stock server would compute to its end."""
    body = ask(90, max_tokens=1500, stream=streamed)
    connection = llama.alone.send(COMPLETIONS, body)
    until(llama.alone, lambda c: c.output_tokens > 0 and c.requests_active == 1)
    connection.sock.close()
    until(llama.alone, idle)
    check_next_is_right(llama)


def test_a_client_that_hangs_up_ends_both_kinds_of_leg(llama: Trio) -> None:
    """U1: each end frees its own when the router closes both connections."""
    leg = llama.pair.leg()
    prefill = llama.pair.prefill.send(COMPLETIONS, SPEC.prefill_body(ask(1900), leg))
    until(llama.pair.prefill, lambda c: c.requests_active == 1)
    decode = llama.pair.decode.send(COMPLETIONS, SPEC.decode_body(ask(1900), leg))
    until(llama.pair.decode, lambda c: c.requests_active == 1)
    prefill.sock.close()
    decode.sock.close()
    check_next_is_right(llama)


def test_requests_cancelled_at_random_moments_leave_nothing(llama: Trio) -> None:
    """R19: forty at once, each hung up or aborted after another time."""

    def one(index: int) -> None:
        leg = llama.pair.leg()
        body = ask(65 + 37 * (index % 20), seed=index, max_tokens=40, stream=True)
        legs = [
            llama.pair.prefill.send(COMPLETIONS, SPEC.prefill_body(body, leg)),
            llama.pair.decode.send(COMPLETIONS, SPEC.decode_body(body, leg)),
        ]
        moment = threading.Event()
        moment.wait(0.005 * (index % 23))
        for connection, process in zip(legs, (llama.pair.prefill, llama.pair.decode), strict=True):
            if index % 2:
                process.post("/pdctl/abort", {"room": leg.room})
            connection.close()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_next_is_right(llama)


def test_a_prompt_over_the_whole_budget_is_refused_before_prefill(
    folder: Path, llama: Trio
) -> None:
    """R40: nothing is computed for it, and one that fits goes through."""
    small = llama.contract.page_bytes * 2
    with start(folder, llama, "p1", Role.PREFILL, buffer_bytes=small) as prefill:
        pair = Pair(prefill, llama.pair.decode)
        (status, answer), (decoded, refused) = pair.post(COMPLETIONS, ask(193))
        assert (status, answer["error"]["code"]) == (400, "over_budget")
        assert (decoded, refused["error"]["code"]) == (400, "over_budget")
        assert prefill.counters().prompt_tokens == 0
        assert pair.post(COMPLETIONS, ask(128))[0][0] == 200


def test_prompts_wait_for_the_budget_in_turn(folder: Path, llama: Trio) -> None:
    """R41: four prompts of which two fit, all are answered."""
    small = llama.contract.page_bytes * 6
    with start(folder, llama, "p1", Role.PREFILL, buffer_bytes=small) as prefill:
        pair = Pair(prefill, llama.pair.decode)
        statuses: list[int] = []

        def run(seed: int) -> None:
            statuses.extend(status for status, _ in pair.post(COMPLETIONS, ask(190, seed)))

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [200] * 8
        assert idle(until(prefill, idle))


def test_legs_with_different_prompts_fail_with_their_cause(llama: Trio) -> None:
    """A template that renders otherwise on one side is named as what it is."""
    leg = llama.pair.leg()
    prefill = llama.pair.prefill.send(COMPLETIONS, SPEC.prefill_body(ask(100, 1), leg))
    status, answer = llama.pair.decode.post(COMPLETIONS, SPEC.decode_body(ask(100, 2), leg))
    assert (status, answer["error"]["code"]) == (502, "tokens")
    response = prefill.getresponse()
    assert (response.status, json.loads(response.read())["error"]["code"]) == (502, "tokens")
    prefill.close()
    assert any(f.room == leg.room and f.cause == "tokens" for f in all_failures(llama.pair))
    check_next_is_right(llama)


def all_failures(pair: Pair) -> list[Any]:
    for process in (pair.prefill, pair.decode):
        process.counters()
    return [*pair.prefill.agent.failures, *pair.decode.agent.failures]


def test_decode_computes_the_prompt_itself_where_the_topology_says_so(
    folder: Path, llama: Trio
) -> None:
    """on_failure = "recompute": the text is right, and the failure is counted all the same."""
    recompute = OnFailure.RECOMPUTE
    with start(folder, llama, "d1", Role.DECODE, on_failure=recompute) as decode:
        pair = Pair(llama.pair.prefill, decode)
        leg = pair.leg(timeout_s=2.0)
        status, answer = decode.post(COMPLETIONS, SPEC.decode_body(ask(100), leg))
        assert status == 200
        assert text_of(answer) == text_of(llama.alone.post(COMPLETIONS, ask(100))[1])
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        counters = decode.counters()
        assert counters.handoffs_failed == 1
        assert counters.imported_tokens == 0


def start(folder: Path, llama: Trio, name: str, role: Role, **settings: Any) -> Process:
    return Process(folder, name, role, llama.model_dir, llama.contract, **settings)


@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("killed", ["prefill", "decode"])
def test_an_end_that_is_killed_fails_the_other_within_seconds(
    folder: Path, llama_dir: Path, killed: str, connected: bool
) -> None:
    """U29, R4, R7: the survivor answers an error, holds nothing and serves the next request;
    at once where the connection breaks, at the leg's own deadline where there was none yet."""
    with ExitStack() as stack:
        fresh = trio(stack, folder, llama_dir, ComputeDtype.FLOAT32)
        pair, leg, body = fresh.pair, fresh.pair.leg(timeout_s=5.0), ask(1900)
        prefill = pair.prefill.send(COMPLETIONS, SPEC.prefill_body(body, leg))
        decode = pair.decode.send(COMPLETIONS, SPEC.decode_body(body, leg))
        victim, other = pair.prefill, pair.decode
        lost, survivor = prefill, decode
        if killed == "decode":
            victim, other, lost, survivor = other, victim, survivor, lost
        if connected:
            until(victim, lambda c: c.handoffs_active == 1)
        until(other, lambda c: c.requests_active == 1)
        victim.process.kill()
        begun = time.monotonic()
        assert status_of(survivor) == 502
        assert time.monotonic() - begun < 15
        until(other, idle)
        assert other.post(COMPLETIONS, ask(40))[0] == 200
        lost.close()


def test_sigterm_ends_a_busy_replica_within_five_seconds(folder: Path, llama: Trio) -> None:
    """R23: also with a stream running; the process leaves no error."""
    with start(folder, llama, "o1", Role.BOTH) as process:
        busy = process.send(COMPLETIONS, ask(50, max_tokens=1900))
        until(process, lambda c: c.output_tokens > 0)
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(5) == 0
        with pytest.raises((RemoteDisconnected, ConnectionError, AssertionError)):
            assert status_of(busy) == 200
        busy.close()


def test_a_loop_that_dies_takes_the_process_with_it(
    folder: Path, llama: Trio, tmp_path: Path
) -> None:
    """U27: never a server whose health is fine and whose only thread is dead."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in llama.model_dir.iterdir():
        (broken / path.name).symlink_to(path)
    (broken / "model.safetensors").unlink()
    process = Process(folder, "x0", Role.BOTH, broken, llama.contract)
    with pytest.raises(AssertionError, match="error: the engine stopped"), process:
        pass
    assert process.process.returncode != 0


def test_an_agent_that_restarts_finds_its_replica_again(folder: Path, llama: Trio) -> None:
    """The replica serves on meanwhile and reports ready again."""
    with start(folder, llama, "o1", Role.BOTH) as process:
        port = process.http_port
        process.agent.go_away()
        connection = HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        connection.request("POST", COMPLETIONS, json.dumps(ask(30)))
        assert status_of(connection) == 200
        process.agent.listen()
        process.agent.wait("ready")
        assert process.http_port == port


def test_memory_descriptors_and_threads_stay_flat(llama: Trio) -> None:
    """U7, U17: sixty handoffs after a warm-up of twenty."""
    proc = Path(f"/proc/{llama.pair.decode.process.pid}")
    if not proc.exists():
        pytest.skip("needs /proc")

    def run(count: int) -> tuple[int, int]:
        for seed in range(count):
            assert llama.pair.post(COMPLETIONS, ask(200, seed, max_tokens=2))[1][0] == 200
        until(llama.pair.decode, idle)
        return len(os.listdir(proc / "fd")), len(os.listdir(proc / "task"))

    before, after = run(20), run(60)
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 2
