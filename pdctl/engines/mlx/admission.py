"""From an HTTP request to a call in the engine. Runs on the request's own HTTP thread."""

from __future__ import annotations

import threading
from typing import Any

import msgspec

from pdctl.engines.interface import Leg
from pdctl.engines.mlx import versions
from pdctl.engines.mlx.call import Call
from pdctl.engines.mlx.failure import RequestFailure, failure_of, refused
from pdctl.engines.mlx.legs import DecodeLeg, PrefillLeg
from pdctl.engines.mlx.loop import EngineLoop
from pdctl.engines.mlx.sampling import make_processors, make_sampler
from pdctl.engines.mlx.shared import SharedPrefix
from pdctl.engines.mlx.shortest import Shortest
from pdctl.errors import HandoffCancelled, HandoffError
from pdctl.handoff.seam import ReceivingEnd, SendingEnd
from pdctl.handoff.store.interface import PageStore
from pdctl.topology.model import PAGE_TOKENS, OnFailure, Role


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What pdctl adds to a request's body."""

    leg: Leg | None = None
    keeps_prefix: bool = True
    salt: str = ""
    """`cache_salt`: what is kept of the prompt is for requests of the same one alone (R48)."""


class Admission:
    """Checks a request, tokenises it and starts its leg, so that the loop never waits for it."""

    def __init__(
        self,
        engine: EngineLoop,
        *,
        replica: str,
        role: Role,
        on_failure: OnFailure,
        sender: SendingEnd | None,
        receiver: ReceivingEnd | None,
        store: PageStore | None = None,
    ) -> None:
        self._engine = engine
        self._replica = replica
        self._role = role
        self._recomputes = on_failure is OnFailure.RECOMPUTE
        self._sender = sender
        self._receiver = receiver
        self._store = store
        self._tokenizing = threading.Lock()
        self._shortest = Shortest(engine.tokenizer)

    def admit(self, request: Any, args: Any, asked: Asked) -> Call:
        """The call, on its way into the batch.

        Raises:
            RequestFailure: refused; nothing is held for it.
        """
        role = self._role_of(asked.leg)
        call = self._prepare(request, args, asked)
        self._check(call)
        try:
            self._engine.enter(call)
        except HandoffError as error:
            raise failure_of(error) from error
        try:
            self._start(call, asked, role)
        except BaseException as error:
            self._engine.end(call, error)
            raise failure_of(error) from error
        return call

    def cancel(self, call: Call) -> None:
        """The client is gone, or reads no more."""
        self._engine.end(call, HandoffCancelled("the client went away"))

    def _role_of(self, leg: Leg | None) -> Role | None:
        if leg is None:
            return None
        if leg.prefill == self._replica and self._sender is not None:
            return Role.PREFILL
        if leg.decode == self._replica and self._receiver is not None:
            return Role.DECODE
        raise refused(
            f'replica "{self._replica}" ({self._role.value}) is no end of'
            f" {leg.prefill}>{leg.decode}",
            "pdctl",
        )

    def _prepare(self, request: Any, args: Any, asked: Asked) -> Call:
        engine, tokenizer = self._engine, self._engine.tokenizer
        try:
            with self._tokenizing:
                self._check_length(request, args)
                prompt = versions.tokenize(engine, tokenizer, request, args)
                state = prompt.initial_state
                stops, rules = versions.stop_rules(engine, tokenizer, args.stop_words, state)
        except RequestFailure:
            raise
        # a template or a tokenizer refuses what the client sent
        except Exception as error:
            raise refused(f"the prompt cannot be tokenised: {error}") from error
        room = asked.leg.room if asked.leg is not None else None
        keeps = asked.leg is None and asked.keeps_prefix
        call = Call(prompt, args, room=room, keeps_prefix=keeps, salt=asked.salt)
        call.stops = stops
        call.context = versions.context(tokenizer, prompt, rules, lambda: self.cancel(call))
        try:
            call.sampler = make_sampler(args, tokenizer, lambda error: engine.end(call, error))
            call.processors = make_processors(args, lambda error: engine.end(call, error))
        except ValueError as error:
            raise refused(str(error)) from error
        return call

    def _check_length(self, request: Any, args: Any) -> None:
        """Refuses what is certainly too long before it is tokenised: that takes 1 s per MB."""
        limit = self._engine.contract.positions.context_length
        if versions.characters(request) <= limit:
            return
        text = versions.text(self._engine, self._engine.tokenizer, request, args)
        least = self._shortest.tokens(text)
        if least > limit:
            raise refused(
                f"the prompt has {least} tokens or more; the context holds {limit}", "prompt"
            )

    def _check(self, call: Call) -> None:
        """mlx does not check indices: an id past the vocabulary would read foreign memory."""
        count = len(call.prompt.tokens)
        limit = self._engine.contract.positions.context_length
        vocabulary = self._engine.model.args.vocab_size
        biased = call.args.logits.logit_bias or {}
        if count == 0:
            raise refused("the prompt is empty", "prompt")
        if count > limit:
            raise refused(f"the prompt has {count} tokens; the context holds {limit}", "prompt")
        if not all(0 <= token < vocabulary for token in call.prompt.tokens):
            raise refused(f"the prompt has a token outside [0, {vocabulary})", "prompt")
        if not all(0 <= token < vocabulary for token in biased):
            raise refused(f"logit_bias names a token outside [0, {vocabulary})", "logit_bias")
        call.args.max_tokens = max(1, min(call.args.max_tokens, limit - count))

    def _start_alone(self, call: Call) -> None:
        shared = self._shared(call) if call.keeps_prefix else None
        if shared is None:
            self._engine.insert(call)
            return
        call.leg = shared
        shared.start()

    def _shared(self, call: Call) -> SharedPrefix | None:
        """A prompt within one page is not shared: it would take a page to save less of one."""
        if self._store is None or len(call.prompt.tokens) <= PAGE_TOKENS:
            return None
        return SharedPrefix(self._engine, call, self._store)

    def _start(self, call: Call, asked: Asked, role: Role | None) -> None:
        leg = asked.leg
        if leg is None or role is None:
            self._start_alone(call)
        elif role is Role.PREFILL and self._sender is not None:
            shared = self._shared(call) if asked.keeps_prefix else None
            sending = PrefillLeg(self._engine, call, leg, shared)
            call.leg = sending
            sending.start(self._sender)
        elif self._receiver is not None:
            store = self._store if asked.keeps_prefix else None
            receiving = DecodeLeg(
                *(self._engine, call, leg), recomputes=self._recomputes, store=store
            )
            call.leg = receiving
            receiving.start(self._receiver)
