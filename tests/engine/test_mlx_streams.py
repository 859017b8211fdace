"""Streams that run while handoffs end, stall or are frozen, on real engines."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from engine.conftest import Trio
from engines.replicas import SPEC, WAIT_S, Process, read_events
from tiny import digits

pytestmark = pytest.mark.engine

COMPLETIONS = "/v1/completions"
LONG = 1900


def ask(tokens: int, seed: int = 0, **fields: Any) -> dict[str, Any]:
    prompt = digits(tokens, seed)
    return {"prompt": prompt, "max_tokens": 8, "temperature": 0, "pdctl_cache": False, **fields}


@contextlib.contextmanager
def streaming(process: Process, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a stream that has begun."""
    connection, response = process.open(COMPLETIONS, {**body, "stream": True})
    try:
        assert response.status == 200
        yield read_events(response)
    finally:
        response.close()
        connection.close()


def endless(process: Process) -> Generator[dict[str, Any], None, None]:
    """Stream after stream."""
    while True:
        with streaming(process, ask(20, seed=1, max_tokens=LONG)) as events:
            yield from events


@contextlib.contextmanager
def frozen(process: Process) -> Iterator[None]:
    """A process that is alive and does nothing."""
    os.kill(process.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.process.pid, signal.SIGCONT)


def until(holds: Callable[[], bool]) -> None:
    """Polls counters, as the agent does, until they say so."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline


def check_goes_on(events: Iterator[dict[str, Any]], over: threading.Event) -> None:
    """Tokens keep coming until something else is over, and it is over because of the freeze."""
    counted = 0
    while not over.is_set():
        next(events)
        counted += 1
    # 5 s of silence: thousands of tokens of the tiny model where nothing blocks, at most a
    # handful where the loop waits with the frozen peer
    assert counted >= 100


def test_a_long_decode_goes_on_past_its_legs_deadline(llama: Trio) -> None:
    """R1: the handoff's deadline is over long before the stream, which ends with its last
    token; neither end holds anything of the room meanwhile."""
    leg = llama.pair.leg(timeout_s=1.0)
    body = ask(100, max_tokens=LONG, logprobs=True, top_logprobs=10)
    begun = time.monotonic()
    prefill = llama.pair.prefill.send(COMPLETIONS, SPEC.prefill_body(body, leg))
    with streaming(llama.pair.decode, SPEC.decode_body(body, leg)) as events:
        answer = prefill.getresponse()
        assert (answer.status, answer.read() != b"") == (200, True)
        prefill.close()
        last = next(events)
        for process in (llama.pair.prefill, llama.pair.decode):
            assert process.counters().handoffs_active == 0
        assert llama.pair.prefill.counters().buffer_bytes_used == 0
        for event in events:
            last = event
        assert last["choices"][0]["finish_reason"] == "length"
    assert time.monotonic() - begun > leg.timeout_s
    assert llama.pair.decode.counters().failures == {}


def test_a_frozen_decode_stalls_no_stream_of_its_prefill(llama: Trio) -> None:
    """R11: prefill has its pages and a peer that says nothing; its other stream goes on until
    the silence, or the leg's deadline where the freeze came before its Hello, ends the leg."""
    leg, body = llama.pair.leg(timeout_s=8.0), ask(LONG)
    with contextlib.closing(endless(llama.pair.prefill)) as events:
        next(events)
        over = threading.Event()
        decode = llama.pair.decode.send(COMPLETIONS, SPEC.decode_body(body, leg))
        prefill = llama.pair.prefill.send(COMPLETIONS, SPEC.prefill_body(body, leg))
        with frozen(llama.pair.decode):
            waiting = threading.Thread(target=lambda: (prefill.getresponse().read(), over.set()))
            waiting.start()
            check_goes_on(events, over)
            waiting.join()
        prefill.close()
        decode.close()


def test_a_frozen_prefill_stalls_no_stream_of_its_decode(llama: Trio) -> None:
    """R11: after it has begun; decode's other stream goes on until the handoff is given up."""
    leg, body = llama.pair.leg(timeout_s=8.0), ask(LONG, seed=2)
    with contextlib.closing(endless(llama.pair.decode)) as events:
        next(events)
        prefill = llama.pair.prefill.send(COMPLETIONS, SPEC.prefill_body(body, leg))
        decode = llama.pair.decode.send(COMPLETIONS, SPEC.decode_body(body, leg))
        over = threading.Event()
        until(lambda: llama.pair.prefill.counters().buffer_bytes_used > 0)
        with frozen(llama.pair.prefill):
            waiting = threading.Thread(target=lambda: (decode.getresponse().read(), over.set()))
            waiting.start()
            check_goes_on(events, over)
            waiting.join()
        prefill.close()
        decode.close()
