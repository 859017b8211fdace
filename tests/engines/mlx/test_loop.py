"""The engine's loop in this process, on a tiny model: what it shares and what it does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from engines.mlx.loops import WAIT_S, Engine, tokens_of, until
from engines.replicas import contract_of
from handoff.peers import hear, proved_link
from mlx.utils import tree_flatten
from tiny import digits, make_checkpoint

from pdctl.engines.mlx import legs, versions
from pdctl.engines.mlx.call import Call
from pdctl.engines.mlx.failure import RequestFailure
from pdctl.engines.mlx.http import Handler, Server
from pdctl.handoff import wire
from pdctl.handoff.transport.tcp import TcpTransport
from pdctl.topology.model import ComputeDtype


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def running(model_dir: Path) -> Iterator[Engine]:
    made = Engine(model_dir, contract_of(model_dir), ComputeDtype.FLOAT32)
    assert made.loop.loaded.wait(WAIT_S), made.died
    yield made
    made.close()


@pytest.fixture
def engine(running: Engine) -> Iterator[Engine]:
    """Idle before and after each test, and alive."""
    yield running
    until(running.idle)
    assert running.died == []


def test_a_long_decode_goes_on_past_its_handoffs_deadline(engine: Engine) -> None:
    """R1: a hundred of its leg's deadlines pass after the first token; nothing of the room is
    under way any more, and the last of the asked tokens comes."""
    leg = engine.leg()
    call, outbound = engine.fetch(digits(130), 100, leg)
    outbound.written(129)
    outbound.finish(7)
    call.first()
    assert outbound.settled.wait(WAIT_S)
    with engine.between_steps():
        engine.now_s += 100 * leg.timeout_s
        assert engine.receiver.check() is False
        assert engine.sender.check() is False
        assert engine.board.read().handoffs_active == 0
    assert len(list(call.responses())) == 100
    assert engine.board.read().failures.get("expired", 0) == 0


def test_a_decode_tells_of_its_tokens_until_it_ends(engine: Engine) -> None:
    """R5: whoever waits for an answer that is not streamed hears that its room moves on; of one
    that was aborted nothing is told any more."""
    for aborted in (False, True):
        leg = engine.leg()
        call, outbound = engine.fetch(digits(130), 400, leg)
        assert engine.board.read().decoding == {}
        outbound.written(129)
        outbound.finish(7)
        call.first()
        next(call.responses())
        with engine.between_steps():
            assert engine.board.read().decoding.keys() == {leg.room}
        if aborted:
            engine.loop.abort(leg.room)
        else:
            assert len(list(call.responses())) == 399
        until(lambda: engine.board.read().decoding == {})
        assert outbound.settled.wait(WAIT_S)


def test_a_receiver_that_freezes_stalls_no_other_stream(engine: Engine) -> None:
    """R11: it has granted everything and reads nothing more; prefill computes, and another
    stream goes from its first token to its last before that handoff is over."""
    leg, prompt = engine.leg(), digits(300)
    with proved_link(TcpTransport(), engine.port) as link:
        frozen = engine.admit(prompt, leg=leg)
        hello = wire.Hello(decode="d0", ticket=leg.ticket)
        link.send(hello, leg.room, fingerprint=engine.contract.digest)
        assert isinstance(hear(link), wire.Offer)
        link.send(wire.Grant(tokens=299, held_tokens=0, first_token=False), leg.room)
        assert len(tokens_of(engine.admit(digits(20), max_tokens=40))) == 40
        assert engine.board.read().handoffs_active == 1
        assert not frozen.ended
        engine.admission.cancel(frozen)
        with pytest.raises(RequestFailure):
            frozen.first()


def test_a_sender_that_freezes_stalls_no_other_stream(engine: Engine) -> None:
    """R11: the first pages are here and no more come; another stream goes to its end."""
    call, outbound = engine.fetch(digits(300), 8, engine.leg())
    outbound.written(128)
    until(lambda: engine.board.read().handoffs_active == 2)
    assert len(tokens_of(engine.admit(digits(20), max_tokens=40))) == 40
    assert not call.ended
    engine.decoding.cancel(call)
    with pytest.raises(RequestFailure):
        call.first()
    assert outbound.settled.wait(WAIT_S)


def test_pages_that_cannot_be_published_fail_their_own_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R35: prefill's export raises in the step that gives others their tokens, who get them."""
    reference = tokens_of(engine.admit(digits(20)))

    class Broken(legs.Export):
        def take(self, caches: list[Any], row: int, positions: int) -> None:
            raise RuntimeError("the pages are gone")

    monkeypatch.setattr(legs, "Export", Broken)
    with engine.between_steps():
        published = engine.admit(digits(200), leg=engine.leg())
        others = [engine.admit(digits(20)) for _ in range(3)]
    with pytest.raises(RequestFailure, match="the pages are gone"):
        published.first()
    assert [tokens_of(other) for other in others] == [reference] * 3
    until(engine.idle)
    assert engine.board.read().handoffs_failed == 1


def test_a_leg_that_cannot_let_go_keeps_no_other_from_ending(engine: Engine) -> None:
    """R36: three requests end in one step, and the first one's release raises; all three have
    ended, whether they ended by themselves or were ended."""

    class Broken:
        def release(self, error: BaseException | None) -> None:
            raise RuntimeError("the connection to the agent is gone")

    with engine.between_steps():
        calls = [engine.admit(digits(20), max_tokens=3) for _ in range(3)]
        calls[0].leg = Broken()
    assert [len(tokens_of(call)) for call in calls] == [3, 3, 3]
    until(engine.idle)

    with engine.between_steps():
        calls = [engine.admit(digits(20)) for _ in range(3)]
        for call in calls:
            call.leg = Broken()
        engine.loop.end_all(RuntimeError("stopping"))
    for call in calls:
        with pytest.raises(RequestFailure, match="stopping"):
            call.first()


def test_a_prompt_that_is_being_encoded_stops_nobody(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R39, R11: encoding runs on the request's own thread; while one is stuck in it, another
    stream goes from its first token to its last."""
    inside, go_on, threads = threading.Event(), threading.Event(), []
    tokenize = versions.tokenize

    def slow(*arguments: Any) -> versions.Prompt:
        threads.append(threading.current_thread())
        inside.set()
        assert go_on.wait(WAIT_S)
        return tokenize(*arguments)

    other = engine.admit(digits(20), max_tokens=40)
    monkeypatch.setattr(versions, "tokenize", slow)
    admitted: list[Call] = []
    request = threading.Thread(target=lambda: admitted.append(engine.admit(digits(30))))
    request.start()
    assert inside.wait(WAIT_S)
    assert len(tokens_of(other)) == 40
    assert threads == [request]
    go_on.set()
    request.join(WAIT_S)
    assert len(tokens_of(admitted[0])) == 8


def test_a_stream_that_is_never_read_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """R20: the client goes between the first token and the status line, so that nobody begins
    to read the rest; the request does not run on for nobody."""

    def gone(handler: Handler, status: int = 200) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(Handler, "_set_stream_headers", gone)
    before = engine.board.read().output_tokens
    with Server("127.0.0.1", 0, engine.loop, engine.admission) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=WAIT_S)
        body = f'{{"prompt": "{digits(20)}", "max_tokens": 4000, "stream": true}}'
        connection.request("POST", "/v1/completions", body)
        with pytest.raises((HTTPException, ConnectionError)):
            connection.getresponse()
        connection.close()
        until(engine.idle)
        server.shutdown()
        serving.join()
    assert engine.board.read().output_tokens - before < 4000


def test_weights_of_another_half_type_are_cast_once_on_the_loops_thread(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R33: a bfloat16 checkpoint served as float16: said once, and nothing stays bfloat16."""
    stored = tmp_path / "bfloat16"
    stored.mkdir()
    for path in model_dir.iterdir():
        if path.suffix != ".safetensors":
            (stored / path.name).symlink_to(path)
    weights = mx.load(str(model_dir / "model.safetensors"))
    cast = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
    mx.save_safetensors(str(stored / "model.safetensors"), cast, metadata={"format": "pt"})
    told: list[tuple[str, threading.Thread]] = []

    def warning(text: str, *values: object) -> None:
        told.append((text % values, threading.current_thread()))

    monkeypatch.setattr("pdctl.engines.mlx.loop.log.warning", warning)
    made = Engine(stored, contract_of(model_dir), ComputeDtype.FLOAT16)
    try:
        assert made.loop.loaded.wait(WAIT_S), made.died
        dtypes = {value.dtype for _, value in tree_flatten(made.loop.model.parameters())}
        assert dtypes == {mx.float16}
        ((text, thread),) = told
        assert "bfloat16, computing in float16: cast once" in text.replace("mlx.core.", "")
        assert thread is made.loop._generation_thread
        assert len(tokens_of(made.admit(digits(20)))) == 8
    finally:
        made.close()
