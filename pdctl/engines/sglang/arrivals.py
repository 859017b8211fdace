"""Requests that come to SGLang's scheduler and leave it, in the scheduler's own thread.

SGLang's senders and receivers never see their request: its leg and its tokens are given to them
here. A request without a leg would end a decode replica's scheduler (it has no address to
ask), so on a replica that moves KV it is refused here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import msgspec
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, prepare_abort
from sglang.srt.managers.utils import is_health_check_generate_req

from pdctl.engines.interface import Leg
from pdctl.engines.sglang.joining import board
from pdctl.engines.sglang.spec import LEG_FIELD, failure_text
from pdctl.errors import ProtocolViolation


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
        req.disagg_kv_sender.begin(leg, list(req.origin_input_ids))


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
    if leg is None:
        return
    original(queue, req, *rest, **named)
    if queue.queue and queue.queue[-1].req is req:
        queue.queue[-1].kv_receiver.begin(leg, list(req.origin_input_ids))


def finished(streamer: Any, reqs: Iterable[Any], *_: Any, **__: Any) -> None:
    """Before SGLang sends requests' output on: those that are over are counted, once."""
    for req in reqs:
        if req.finished() and not req.finished_output and not is_health_check_generate_req(req):
            board().add(prompt_tokens=len(req.origin_input_ids), output_tokens=len(req.output_ids))


def _is_own(req: Any) -> bool:
    """Of SGLang itself: its warm-up and its health check move nothing."""
    return bool(req.bootstrap_host == FAKE_BOOTSTRAP_HOST)


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
        text = failure_text(ProtocolViolation.cause, said)
        prepare_abort(req, text, status_code=HTTPStatus.BAD_REQUEST)
        queue.scheduler.output_streamer.stream_output([req], req.return_logprob)
        return None
    return leg
