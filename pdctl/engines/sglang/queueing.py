"""Where page sharing takes part in SGLang's scheduler; without it, nothing changes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdctl.engines.sglang import joining


def chosen(original: Callable[..., Any], scheduler: Any, *rest: Any, **named: Any) -> Any:
    """Around the choice of what is computed next: requests whose prompt is still looked for
    are left out of it, and keep their places."""
    sharing = joining.sharing()
    held = sharing.look() if sharing is not None else []
    if not held:
        return original(scheduler, *rest, **named)
    queue = scheduler.waiting_queue
    kept = {id(req) for req in held}
    scheduler.waiting_queue = [req for req in queue if id(req) not in kept]
    try:
        return original(scheduler, *rest, **named)
    finally:
        scheduler.waiting_queue = held + scheduler.waiting_queue


def idle(original: Callable[..., bool], scheduler: Any, *rest: Any, **named: Any) -> bool:
    """Around SGLang's look whether nothing goes on, before it counts its blocks: those that
    pages are copied into are neither free nor in its tree."""
    sharing = joining.sharing()
    moves = sharing is not None and sharing.moving > 0
    asks_for_health = bool(rest) or named.get("for_health_check", False)
    return original(scheduler, *rest, **named) and (asks_for_health or not moves)


def computed(original: Callable[..., Any], processor: Any, batch: Any, *rest: Any) -> Any:
    """Around a step's result in which prompts were computed, on an ordinary replica or on one of
    prefill."""
    sharing = joining.sharing()
    if sharing is None:
        return original(processor, batch, *rest)
    begun = sharing.begin(batch.reqs)
    result = original(processor, batch, *rest)
    sharing.end(begun)
    return result
