"""Requests that come to SGLang's scheduler and leave it, in the scheduler's own thread.

SGLang's senders and receivers never see their request: its leg and its tokens are given to them
here. A request without a leg would end a decode replica's scheduler (it has no address to
ask), so on a replica that moves KV it is refused here too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import msgspec
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, prepare_abort
from sglang.srt.managers.utils import is_health_check_generate_req

from pdctl.engines.interface import Leg
from pdctl.engines.sglang.joining import board
from pdctl.engines.sglang.sharing import past_stores, salt_of
from pdctl.engines.sglang.spec import LEG_FIELD, failure_text
from pdctl.errors import BudgetExceeded, HandoffError, ProtocolViolation

log = logging.getLogger("pdctl.engines.sglang")


def to_prefill(
    original: Callable[..., None], queue: Any, req: Any, *rest: Any, **named: Any
) -> None:
    """Around `PrefillBootstrapQueue.add`."""
    if _is_own(req):
        original(queue, req, *rest, **named)
        return
    leg = _leg_or_refused(queue, req)
    if leg is None:
        return
    original(queue, req, *rest, **named)
    if queue.queue and queue.queue[-1] is req:
        _begin(req.disagg_kv_sender, leg, req)


def to_decode(
    original: Callable[..., None], queue: Any, req: Any, *rest: Any, **named: Any
) -> None:
    """Around `DecodePreallocQueue.add`, which also takes requests back whose blocks SGLang has
    taken from them: their handoff is over."""
    again = any(rest) or any(named.values())
    if _is_own(req) or again:
        original(queue, req, *rest, **named)
        return
    leg = _leg_or_refused(queue, req)
    if leg is None or _never_fits(queue, req):
        return
    original(queue, req, *rest, **named)
    if queue.queue and queue.queue[-1].req is req:
        salt = None if past_stores(req) else salt_of(req)
        _begin(queue.queue[-1].kv_receiver, leg, req, salt=salt)


def computed(streamer: Any, reqs: Iterable[Any], *_: Any, **__: Any) -> None:
    """Before SGLang sends on what a step has computed: a request that came through a room goes
    on, or is over; those that are over are counted, once."""
    try:
        _count(reqs)
    # what a step has computed goes out all the same (R35)
    except Exception:
        log.exception("a step was not counted")


def _count(reqs: Iterable[Any]) -> None:
    counts = board()
    for req in reqs:
        if is_health_check_generate_req(req) or (req.finished() and req.finished_output):
            continue
        if not req.finished():
            if req.bootstrap_room:
                counts.decoded(req.bootstrap_room)
            continue
        if req.bootstrap_room:
            counts.decode_over(req.bootstrap_room)
        if req.output_ids:  # one that ended before that was refused, or left
            counts.add(prompt_tokens=len(req.origin_input_ids), output_tokens=len(req.output_ids))


def _begin(end: Any, leg: Leg, req: Any, **named: Any) -> None:
    try:
        end.begin(leg, list(req.origin_input_ids), **named)
    # one request's end must not be the scheduler's, which all share (R34)
    except Exception as error:
        log.exception("room=%s the leg did not begin", leg.room)
        end.fail(leg, HandoffError(f"the engine failed: {error!r}"))


def _is_own(req: Any) -> bool:
    """Of SGLang itself: its warm-up and its health check move nothing."""
    return bool(req.bootstrap_host == FAKE_BOOTSTRAP_HOST)


def _never_fits(queue: Any, req: Any) -> bool:
    """SGLang keeps tokens in reserve for every answer, and would wait for ever with a prompt
    that all of its memory does not hold beside them (U9)."""
    longest = queue.max_total_num_tokens - queue.num_reserved_decode_tokens
    tokens = len(req.origin_input_ids)
    if tokens <= longest:
        return False
    said = f"a prompt of {tokens} tokens does not fit into this replica; at most {longest} do"
    _refuse(queue, req, failure_text(BudgetExceeded.cause, said))
    return True


def _refuse(queue: Any, req: Any, text: str) -> None:
    prepare_abort(req, text, status_code=HTTPStatus.BAD_REQUEST)
    queue.scheduler.output_streamer.stream_output([req], req.return_logprob)


def _leg_or_refused(queue: Any, req: Any) -> Leg | None:
    params = req.sampling_params.custom_params
    try:
        if not isinstance(params, dict) or LEG_FIELD not in params:
            raise msgspec.ValidationError(f"custom_params.{LEG_FIELD} is missing")
        leg = msgspec.convert(params[LEG_FIELD], Leg)
        if leg.room != req.bootstrap_room or not req.bootstrap_host:
            raise msgspec.ValidationError("bootstrap_host and bootstrap_room are not the leg's")
    except msgspec.ValidationError as error:
        said = f"this replica serves no request alone, and this one has no leg: {error}"
        _refuse(queue, req, failure_text(ProtocolViolation.cause, said))
        return None
    return leg
