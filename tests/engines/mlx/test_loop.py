"""The engine's loop in this process, on a tiny model: what it shares and what it does not."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
import mlx_lm.server as library
from engines.replicas import contract_of
from mlx.utils import tree_flatten
from tiny import digits, make_checkpoint

from pdctl.engines.interface import Leg
from pdctl.engines.mlx import legs, versions
from pdctl.engines.mlx.admission import Admission, Asked
from pdctl.engines.mlx.call import Call
from pdctl.engines.mlx.failure import RequestFailure
from pdctl.engines.mlx.http import Handler, Server
from pdctl.engines.mlx.loop import EngineLoop
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.identity import Identity
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.sender import Sender
from pdctl.handoff.ticket import mint
from pdctl.topology.contract import Contract
from pdctl.topology.model import ComputeDtype, OnFailure, Role

KEY = bytes(32)
WAIT_S = 30.0


class Engine:
    """A loop with a prefill replica's handoff end, and no HTTP."""

    def __init__(self, model_dir: Path, contract: Contract, compute: ComputeDtype) -> None:
        self.contract = contract
        self.board = CounterBoard()
        self.died: list[BaseException] = []
        provider = provider_of(model_dir)
        self.loop = EngineLoop(
            provider, contract=contract, compute=compute, board=self.board, died=self.died.append
        )
        self.sender = Sender(
            Identity("p0", KEY, contract.digest),
            PageGeometry.of(contract),
            listen=("127.0.0.1", 0),
            budget_bytes=1 << 26,
            timeout_s=60.0,
            board=self.board,
            on_failed=lambda room, cause, detail: None,
        )
        self.port = self.sender.start()
        self.admission = Admission(
            self.loop,
            replica="p0",
            role=Role.PREFILL,
            on_failure=OnFailure.ERROR,
            sender=self.sender,
            receiver=None,
        )

    def admit(self, prompt: str, max_tokens: int = 8, leg: Leg | None = None) -> Call:
        request = library.CompletionRequest("text", prompt, [], None, None)
        asked = Asked(leg=leg, keeps_prefix=False)
        return self.admission.admit(request, arguments(max_tokens), asked)

    def leg(self) -> Leg:
        room = random.getrandbits(62)
        ticket = mint(KEY, room, "p0", "d0", self.contract.digest, time.time() + 300)
        address = f"127.0.0.1:{self.port}"
        return Leg(
            room=room, ticket=ticket, prefill="p0", decode="d0", sender=address, timeout_s=60.0
        )

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """The loop computes nothing meanwhile; all that is admitted joins the same batch."""
        inside, go_on = threading.Event(), threading.Event()

        def stand_still() -> None:
            inside.set()
            go_on.wait(WAIT_S)

        self.loop.post(stand_still)
        assert inside.wait(WAIT_S)
        try:
            yield
        finally:
            go_on.set()

    def idle(self) -> bool:
        now = self.board.read()
        return (now.requests_active, now.handoffs_active, now.buffer_bytes_used) == (0, 0, 0)

    def close(self) -> None:
        self.sender.close()
        self.loop.stop_and_join()


def provider_of(model_dir: Path) -> Any:
    """What the library's own command line makes."""
    made: list[Any] = []
    argv, run = sys.argv, library.run
    sys.argv = ["server", "--model", str(model_dir), "--prefill-step-size", "64"]
    library.run = lambda host, port, provider: made.append(provider)
    try:
        library.main()
    finally:
        sys.argv, library.run = argv, run
    return made[0]


def arguments(max_tokens: int) -> Any:
    return library.GenerationArguments(
        model=library.ModelDescription("default_model", None, None),
        sampling=library.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.0),
        logits=library.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
        stop_words=[],
        max_tokens=max_tokens,
        num_draft_tokens=0,
        logprobs=False,
        top_logprobs=0,
        seed=None,
        chat_template_kwargs=None,
    )


def tokens_of(call: Call) -> list[int]:
    call.first()
    return [response.token for response in call.responses()]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline


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
    assert engine.board.read().output_tokens - before < 1000


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
