"""The connector's half in vLLM's scheduler: when a request may have blocks. No I/O, no engine.

A request with a leg waits ("the match is not known yet") until its handoff lets it go on: on
prefill until its pages are reserved, on decode until the sender has offered. Nothing is
allocated for it before that, so no two ends wait for each other's memory.

    Waiting  →  Open     reserved, or offered
    Open     →  Placed   it has its blocks
    Waiting, Open  →  Failed  the handoff ended first: it gets one block, which is reported as
                              not loaded, so that vLLM fails this request alone; or, where the
                              topology says so, it computes its prompt itself

Where replicas share their prefixes, a prompt of an ordinary one waits in the same way until what
the host's page store has of it is known, and so does one of prefill once its pages are reserved:

    New      →  Waiting  the engine's own prefix cache lacks a page of it or more
    New      →  Open     it does not: the store isn't asked
    Waiting  →  Open     the store has answered, with a miss where it can't

Where the worker's half is in the same process, these questions and answers go straight there and
back (`line.py`), with no step between.

All methods are called by the scheduler's thread. Objects of vLLM are duck-typed: the names are
those of 0.28.0 to 0.32.0. vLLM's engine dies of what a connector raises, so that an error about
one request ends that request here, and no other (R34).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pdctl.engines.vllm.asks import Ask, Standing, leg_of, progress, released
from pdctl.engines.vllm.line import Line
from pdctl.engines.vllm.load_count import LoadCount
from pdctl.engines.vllm.steps import (
    Begin,
    Doom,
    Export,
    Finish,
    News,
    Notice,
    Place,
    Seek,
    Step,
)
from pdctl.topology.model import PAGE_TOKENS, Role

log = logging.getLogger("pdctl.engines.vllm")


class SchedulerHalf:
    """Args:
    role: of this replica; `both` takes no legs.
    block_tokens: vLLM's block size.
    recomputes: a decode request whose handoff failed computes its prompt here.
    shares: an ordinary or prefill replica's prompts look into the page store.
    line: tells of the worker's half, where that is in this process.
    """

    def __init__(
        self,
        role: Role,
        block_tokens: int,
        *,
        recomputes: bool,
        shares: bool = False,
        line: Callable[[], Line | None] = lambda: None,
    ) -> None:
        self._role = role
        self._block_tokens = block_tokens
        self._recomputes = recomputes
        self._shares = shares
        self._line = line
        self._asks: dict[str, Ask] = {}
        self._count = LoadCount()
        self._begin: list[Begin] = []
        self._seek: list[Seek] = []
        self._finish: list[Finish] = []
        self._place: list[Place] = []
        self._doom: list[Doom] = []
        self._release: list[int] = []

    def arrived(self, request: Any) -> None:
        """A new request; one without a leg is none of ours."""
        self._count.arrived(request)
        params = request.kv_transfer_params
        if not isinstance(params, dict) or "pdctl" not in params:
            # vLLM fails, and does not compute, what a prefill replica could not load
            shares = self._shares and self._role is Role.BOTH
            if shares and request.prompt_token_ids is not None:
                ask = self._asks[request.request_id] = Ask(self._role, request.num_prompt_tokens)
                ask.standing = Standing.NEW
            return
        if (room := released(params["pdctl"])) is not None:
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
        ask.leg = leg_of(params)
        ask.shares = params.get("pdctl_cache", True) is not False
        if ask.leg is not None and self._role is Role.DECODE:
            self._count.follow(request.request_id, ask.leg.room)
        tokens = request.prompt_token_ids
        if ask.leg is None or tokens is None or self._role is Role.BOTH:
            log.warning("request=%s has a leg that is not for this replica", request.request_id)
            ask.standing = Standing.FAILED
            return
        begin = Begin(
            request_id=request.request_id,
            leg=ask.leg,
            token_ids=list(tokens),
            salt=(request.cache_salt or "") if ask.shares else None,
        )
        line = self._line()
        if line is not None:
            line.begin(begin)
        else:
            self._begin.append(begin)

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Positions beyond `local_tokens` that come from elsewhere, and whether they come
        later; None: not known yet. Asked again each step, and again after a preemption."""
        ask = self._asks.get(request.request_id)
        if ask is None or ask.standing is Standing.PLACED:
            return 0, False
        ask.local_tokens = local_tokens
        line = self._line()
        if line is not None:
            self.told(line.news())
        if ask.standing is Standing.NEW:
            self._look(request, ask)
        if ask.standing is Standing.WAITING:
            return None, False
        if ask.standing is Standing.FAILED:
            return (0, False) if self._computes_itself(ask) else (1, True)
        missing = ask.available - local_tokens
        return (missing, True) if missing > 0 else (0, False)

    def _look(self, request: Any, ask: Ask) -> None:
        """One page costs less to compute than to look for."""
        lacking = ask.tokens - 1 - ask.local_tokens
        if lacking < PAGE_TOKENS or request.skip_reading_prefix_cache:
            ask.standing = Standing.OPEN
            return
        ask.standing, ask.sought = Standing.WAITING, True
        seek = Seek(
            request_id=request.request_id,
            token_ids=list(request.prompt_token_ids),
            salt=request.cache_salt or "",
        )
        line = self._line()
        if line is not None:
            line.seek(seek)
        else:
            self._seek.append(seek)

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
        elif ask.fills:
            ask.starts = external_tokens > 0
            self._place.append(
                Place(
                    request_id=request_id,
                    blocks=blocks,
                    held_tokens=ask.available - external_tokens,
                    private=private if external_tokens else [],
                )
            )

    def step(self, scheduled: Any) -> Step:
        """What the worker's half has to do in the step that was just scheduled."""
        made = Step(
            begin=self._begin,
            seek=self._seek,
            finish=self._finish,
            place=self._place,
            doom=self._doom,
            release=self._release,
            starts=list(self._starting(scheduled)),
            export=list(self._exports(scheduled)),
            load=self._count.take(scheduled),
        )
        self._begin, self._finish, self._place, self._doom = [], [], [], []
        self._seek, self._release = [], []
        return made

    def told(self, notices: Sequence[Notice]) -> None:
        for notice in notices:
            ask = self._asks.get(notice.request_id)
            if ask is None or ask.standing in (Standing.PLACED, Standing.FAILED):
                continue
            failed = notice.news is News.FAILED
            ask.standing = Standing.FAILED if failed else Standing.OPEN
            if notice.news is News.RESERVED and self._shares and ask.shares:
                ask.standing = Standing.NEW
            elif notice.news is News.OFFERED:
                ask.available = ask.tokens - 1
            elif notice.news is News.FOUND:
                ask.available = min(notice.tokens, ask.tokens - 1)

    def finished(self, request: Any) -> None:
        """The request has ended, in whatever way; may be called twice."""
        self._count.finished(request)
        ask = self._asks.pop(request.request_id, None)
        if ask is None:
            return
        self._begin = [b for b in self._begin if b.request_id != request.request_id]
        self._seek = [s for s in self._seek if s.request_id != request.request_id]
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

    def _exports(self, scheduled: Any) -> Iterator[Export]:
        for request_id, blocks, anew, computed in progress(scheduled):
            ask = self._asks.get(request_id)
            if ask is None or not ask.exports(computed):
                continue
            ask.blocks = blocks if anew else ask.blocks + blocks
            positions = computed + scheduled.num_scheduled_tokens[request_id]
            yield Export(
                request_id=request_id,
                blocks=list(ask.blocks),
                positions=min(positions, ask.tokens),
            )
