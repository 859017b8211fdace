"""The connector's half in vLLM's scheduler: when a request may have blocks. No I/O, no engine.

A request with a leg waits ("the match is not known yet") until its handoff lets it go on: on
prefill until its pages are reserved, on decode until the sender has offered. Nothing is
allocated for it before that, so no two ends wait for each other's memory.

    Waiting  →  Open     reserved, or offered
    Open     →  Placed   it has its blocks
    Waiting, Open  →  Failed  the handoff ended first: it gets one block, which is reported as
                              not loaded, so that vLLM fails this request alone; or, where the
                              topology says so, it computes its prompt itself

All methods are called by the scheduler's thread. Objects of vLLM are duck-typed: the names are
those of 0.28.0 to 0.32.0. vLLM's engine dies of what a connector raises, so that an error about
one request ends that request here, and no other (R34).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pdctl.engines.interface import Leg
from pdctl.engines.vllm.steps import (
    Begin,
    Doom,
    Export,
    Finish,
    Load,
    News,
    Notice,
    Place,
    Step,
)
from pdctl.topology.model import Role

log = logging.getLogger("pdctl.engines.vllm")


class Standing(enum.Enum):
    WAITING = "waiting"
    OPEN = "open"
    PLACED = "placed"
    FAILED = "failed"


class Ask:
    """One request that has a leg."""

    def __init__(self, role: Role, tokens: int) -> None:
        self.leg: Leg | None = None
        self.role = role
        self.tokens = tokens
        self.standing = Standing.WAITING
        self.local_tokens = 0
        """Positions that the engine's prefix cache held at the last look."""
        self.blocks: list[int] = []
        self.starts = False
        """Imported, and its first forward is still to come."""


class SchedulerHalf:
    """Args:
    role: of this replica; `both` takes no legs.
    block_tokens: vLLM's block size.
    recomputes: a decode request whose handoff failed computes its prompt here.
    """

    def __init__(self, role: Role, block_tokens: int, *, recomputes: bool) -> None:
        self._role = role
        self._block_tokens = block_tokens
        self._recomputes = recomputes
        self._asks: dict[str, Ask] = {}
        self._active: set[str] = set()
        self._begin: list[Begin] = []
        self._finish: list[Finish] = []
        self._place: list[Place] = []
        self._doom: list[Doom] = []
        self._release: list[int] = []
        self._prompt_tokens = self._output_tokens = 0
        self._decoded: list[int] = []

    def arrived(self, request: Any) -> None:
        """A new request; one without a leg is none of ours."""
        self._active.add(request.request_id)
        self._prompt_tokens += request.num_prompt_tokens
        params = request.kv_transfer_params
        if not isinstance(params, dict) or "pdctl" not in params:
            return
        if (room := _released(params["pdctl"])) is not None:
            self._release.append(room)
            return
        ask = self._asks[request.request_id] = Ask(self._role, request.num_prompt_tokens)
        try:
            self._open(request, ask, params)
        # vLLM's scheduler must not die of one request
        except Exception:
            log.exception("request=%s can't be handed over", request.request_id)
            ask.standing = Standing.FAILED

    def _open(self, request: Any, ask: Ask, params: dict[str, Any]) -> None:
        ask.leg = _leg_of(params)
        tokens = request.prompt_token_ids
        if ask.leg is None or tokens is None or self._role is Role.BOTH:
            log.warning("request=%s has a leg that is not for this replica", request.request_id)
            ask.standing = Standing.FAILED
            return
        begin = Begin(request_id=request.request_id, leg=ask.leg, token_ids=list(tokens))
        self._begin.append(begin)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Positions beyond `local_tokens` that come from elsewhere, and whether they come
        later; None: not known yet. Asked again each step, and again after a preemption."""
        ask = self._asks.get(request.request_id)
        if ask is None or ask.standing is Standing.PLACED:
            return 0, False
        ask.local_tokens = local_tokens
        if ask.standing is Standing.WAITING:
            return None, False
        if ask.standing is Standing.FAILED:
            return (0, False) if self._computes_itself(ask) else (1, True)
        if ask.role is Role.PREFILL:
            return 0, False
        missing = ask.tokens - 1 - local_tokens
        return (missing, True) if missing > 0 else (0, False)

    def placed(self, request: Any, blocks: Sequence[int], external_tokens: int) -> None:
        """The request has blocks, those of its prefix cache included."""
        ask = self._asks.get(request.request_id)
        if ask is None or ask.standing is Standing.PLACED:
            return
        try:
            self._place_or_doom(request.request_id, ask, list(blocks), external_tokens)
        # nor of one request's blocks
        except Exception:
            log.exception("request=%s its blocks can't be filled", request.request_id)
            if external_tokens:
                # the last block never comes from the prefix cache
                self._doom.append(Doom(request_id=request.request_id, blocks=list(blocks[-1:])))
        ask.standing = Standing.PLACED

    def _place_or_doom(
        self, request_id: str, ask: Ask, blocks: list[int], external_tokens: int
    ) -> None:
        # whole blocks of the prefix cache are shared with others: theirs is never touched
        private = blocks[ask.local_tokens // self._block_tokens :]
        if ask.standing is Standing.FAILED:
            if external_tokens:
                self._doom.append(Doom(request_id=request_id, blocks=private))
        elif ask.role is Role.DECODE:
            ask.starts = external_tokens > 0
            self._place.append(
                Place(
                    request_id=request_id,
                    blocks=blocks,
                    held_tokens=ask.tokens - 1 - external_tokens,
                    private=private if external_tokens else [],
                )
            )

    def step(self, scheduled: Any) -> Step:
        """What the worker's half has to do in the step that was just scheduled."""
        load = Load(
            requests_active=len(self._active),
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            decoding=list(self._decoding(scheduled)),
            decoded=self._decoded,
        )
        made = Step(
            begin=self._begin,
            finish=self._finish,
            place=self._place,
            doom=self._doom,
            release=self._release,
            starts=list(self._starting(scheduled)),
            export=list(self._exports(scheduled)),
            load=load,
        )
        self._begin, self._finish, self._place, self._doom = [], [], [], []
        self._release = []
        self._prompt_tokens = self._output_tokens = 0
        self._decoded = []
        return made

    def told(self, notices: Sequence[Notice]) -> None:
        for notice in notices:
            ask = self._asks.get(notice.request_id)
            if ask is None or ask.standing is Standing.PLACED:
                continue
            failed = notice.news is News.FAILED
            ask.standing = Standing.FAILED if failed else Standing.OPEN

    def finished(self, request: Any) -> None:
        """The request has ended, in whatever way; may be called twice."""
        if request.request_id in self._active:
            self._active.discard(request.request_id)
            self._output_tokens += len(request.output_token_ids)
        ask = self._asks.pop(request.request_id, None)
        if ask is None:
            return
        if ask.leg is not None and ask.role is Role.DECODE:
            self._decoded.append(ask.leg.room)
        self._begin = [b for b in self._begin if b.request_id != request.request_id]
        outputs = request.output_token_ids
        normal = request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
        token = int(outputs[0]) if normal and len(outputs) else None
        self._finish.append(Finish(request_id=request.request_id, first_token=token))

    def _computes_itself(self, ask: Ask) -> bool:
        return self._recomputes and ask.role is Role.DECODE and ask.leg is not None

    def _starting(self, scheduled: Any) -> Iterator[str]:
        for request_id in scheduled.num_scheduled_tokens:
            ask = self._asks.get(request_id)
            if ask is not None and ask.starts:
                ask.starts = False
                yield request_id

    def _decoding(self, scheduled: Any) -> Iterator[int]:
        for request_id in scheduled.num_scheduled_tokens:
            ask = self._asks.get(request_id)
            if ask is not None and ask.leg is not None and ask.role is Role.DECODE:
                yield ask.leg.room

    def _exports(self, scheduled: Any) -> Iterator[Export]:
        for request_id, blocks, anew, computed in _progress(scheduled):
            ask = self._asks.get(request_id)
            if ask is None or ask.role is not Role.PREFILL:
                continue
            ask.blocks = blocks if anew else ask.blocks + blocks
            positions = computed + scheduled.num_scheduled_tokens[request_id]
            yield Export(
                request_id=request_id,
                blocks=list(ask.blocks),
                positions=min(positions, ask.tokens),
            )


def _progress(scheduled: Any) -> Iterator[tuple[str, list[int], bool, int]]:
    """(request, blocks, whether these are all of its blocks, positions computed before this
    step) of everything that runs. A request resumed after a preemption brings all of them."""
    for new in scheduled.scheduled_new_reqs:
        yield new.req_id, list(new.block_ids[0]), True, new.num_computed_tokens
    cached = scheduled.scheduled_cached_reqs
    for at, request_id in enumerate(cached.req_ids):
        more = cached.new_block_ids[at]
        blocks = list(more[0]) if more else []
        resumed = request_id in cached.resumed_req_ids
        yield request_id, blocks, resumed, cached.num_computed_tokens[at]


def _released(order: Any) -> int | None:
    """The room of an order that takes a leg's place (`spec.release`)."""
    room = order.get("release") if isinstance(order, dict) else None
    return room if isinstance(room, int) else None


def _leg_of(params: dict[str, Any]) -> Leg | None:
    try:
        return msgspec.convert(params["pdctl"], Leg)
    except msgspec.ValidationError as error:
        log.warning("kv_transfer_params.pdctl is not a leg: %s", error)
        return None
