"""An MLX engine's loop in this process, with both ends of a handoff and without HTTP."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx_lm.server as library
from handoff.ends import KEY

from pdctl.engines.interface import Leg
from pdctl.engines.mlx.admission import Admission, Asked
from pdctl.engines.mlx.call import Call
from pdctl.engines.mlx.loop import EngineLoop
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.identity import Identity
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.receiver import Receiver
from pdctl.handoff.sender import Outbound, Sender
from pdctl.handoff.store.interface import PageStore
from pdctl.handoff.ticket import mint
from pdctl.topology.contract import Contract
from pdctl.topology.model import ComputeDtype, OnFailure, Role
from pdctl.trace import monotonic_s

WAIT_S = 30.0


class Engine:
    """A loop with both ends of a handoff, and no HTTP: p0 sends, d0 receives; both use `store`
    where there is one."""

    def __init__(
        self,
        model_dir: Path,
        contract: Contract,
        compute: ComputeDtype,
        store: PageStore | None = None,
    ) -> None:
        self._store = store
        self.contract = contract
        self.board = CounterBoard()
        self.died: list[BaseException] = []
        self.now_s = monotonic_s()
        """Of both ends: stands still unless a test moves it, so that nobody is lost meanwhile."""
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
            clock=lambda: self.now_s,
        )
        self.port = self.sender.start()
        self.receiver = Receiver(
            Identity("d0", KEY, contract.digest),
            PageGeometry.of(contract),
            timeout_s=60.0,
            board=self.board,
            on_failed=lambda room, cause, detail: None,
            clock=lambda: self.now_s,
        )
        self.admission = self._admission("p0", Role.PREFILL, sender=self.sender)
        self.decoding = self._admission("d0", Role.DECODE, receiver=self.receiver)

    def _admission(
        self,
        replica: str,
        role: Role,
        sender: Sender | None = None,
        receiver: Receiver | None = None,
    ) -> Admission:
        return Admission(
            self.loop,
            replica=replica,
            role=role,
            on_failure=OnFailure.ERROR,
            sender=sender,
            receiver=receiver,
            store=self._store,
        )

    def admit(self, prompt: str, max_tokens: int = 8, leg: Leg | None = None) -> Call:
        return self.admission.admit(*asked(prompt, max_tokens, leg))

    def fetch(self, prompt: str, max_tokens: int, leg: Leg) -> tuple[Call, Outbound]:
        """The decode leg of a handoff whose prefill the test computes."""
        reserved = threading.Event()
        outbound = self.sender.admit(
            leg,
            self.loop.tokenizer.encode(prompt, add_special_tokens=False),
            on_reserved=lambda outbound: reserved.set(),
            on_settled=lambda outbound: None,
        )
        assert reserved.wait(WAIT_S)
        return self.decoding.admit(*asked(prompt, max_tokens, leg)), outbound

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
        self.receiver.close()
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


def asked(prompt: str, max_tokens: int, leg: Leg | None) -> tuple[Any, Any, Asked]:
    request = library.CompletionRequest("text", prompt, [], None, None)
    arguments = library.GenerationArguments(
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
    return request, arguments, Asked(leg=leg, keeps_prefix=False)


def tokens_of(call: Call) -> list[int]:
    call.first()
    return [response.token for response in call.responses()]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
