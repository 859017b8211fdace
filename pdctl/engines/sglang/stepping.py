"""Where KV leaves SGLang's forward, layer by layer, on a GPU.

A layer's K and V stand in their slots once its attention backend has returned, whoever stores
them: the backend itself, or a kernel fused with the rotary embedding before it. Every backend's
own `forward` ends in `AttentionBackend.forward`, and so do graphs in pieces, whose attention runs
between them (0.5.21 to 0.5.23). What a whole graph computes of a prompt leaves after the step.

In the scheduler's thread, as all of SGLang's forward is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pdctl.engines.exports import Exports, Taker
from pdctl.engines.sglang import joining
from pdctl.engines.sglang.sending import PrefillLeg

if TYPE_CHECKING:
    from pdctl.engines.sglang.cuda import CudaSlots, Span

log = logging.getLogger("pdctl.engines.sglang")


class Stepping:
    """A prefill replica's, whose `slots` leave by layer."""

    def __init__(self, slots: CudaSlots) -> None:
        self._exports: Exports[Span] = Exports(slots)

    def run(self, batch: Any, forward: Callable[[], Any]) -> Any:
        """One step, in which `forward` enqueues all that it computes."""
        self._exports.begin(list(_spans(batch)))
        try:
            result = forward()
        except BaseException as error:
            self._exports.fail(error)
            raise
        self._exports.finish()
        return result

    def saved(self, layer: int) -> None:
        self._exports.saved(layer)


def ran(original: Callable[..., Any], scheduler: Any, batch: Any, *rest: Any, **named: Any) -> Any:
    """Around `Scheduler.run_batch`."""
    stepping = joining.stepping()
    if stepping is None:
        return original(scheduler, batch, *rest, **named)
    return stepping.run(batch, lambda: original(scheduler, batch, *rest, **named))


def attended(
    original: Callable[..., Any],
    backend: Any,
    q: Any = None,
    k: Any = None,
    v: Any = None,
    layer: Any = None,
    *rest: Any,
    **named: Any,
) -> Any:
    """Around `AttentionBackend.forward`."""
    result = original(backend, q, k, v, layer, *rest, **named)
    stepping = joining.stepping()
    if stepping is not None and layer is not None:
        stepping.saved(layer.layer_id)
    return result


def _spans(batch: Any) -> Iterator[tuple[Taker[Span], Span]]:
    """What the step computes of prompts that are handed over."""
    if not batch.forward_mode.is_extend():
        return
    for req, held, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        leg = req.disagg_kv_sender
        if not isinstance(leg, PrefillLeg):
            continue
        try:
            span = leg.span(req.kv.req_pool_idx, held + length)
        # one request's handoff must not be the scheduler's end, which all share (R34)
        except Exception as error:
            log.exception("a prompt does not leave its step")
            leg.broke(error)
            continue
        if span is not None:
            yield leg, span
