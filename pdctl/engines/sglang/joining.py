"""How SGLang's scheduler process joins its cluster: it owns the KV memory, so the key and the
contract come over the agent's 0600 socket into this process alone."""

from __future__ import annotations

import atexit
import logging
import os
from typing import TYPE_CHECKING, Any

import msgspec

from pdctl.engines.channel import Assignment
from pdctl.engines.session import Loaded, Session
from pdctl.engines.sglang.effective import loaded
from pdctl.engines.sglang.pool import SlotPool, open_pool
from pdctl.engines.sglang.sharing import Sharing
from pdctl.errors import LaunchError
from pdctl.handoff.counters import CounterBoard, Counters
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.store.interface import PageStore
from pdctl.topology.contract import Contract
from pdctl.topology.model import Engine, Role

if TYPE_CHECKING:
    from pdctl.engines.sglang.stepping import Stepping

log = logging.getLogger("pdctl.engines.sglang")

SERVED_PATH = "/ready"
"""SGLang's HTTP server answers 200 there once its warm-up has gone through."""

QUEUES = (
    "waiting_queue",
    "disagg_prefill_inflight_queue",
    "disagg_prefill_bootstrap_queue",
    "disagg_decode_prealloc_queue",
    "disagg_decode_transfer_queue",
)
"""Where a scheduler keeps requests that no batch runs."""

_board = CounterBoard()
_sharing: Sharing | None = None
_stepping: Stepping | None = None


def board() -> CounterBoard:
    """This process's counters; nobody reads them before it has joined."""
    return _board


def sharing() -> Sharing | None:
    """This process's, where it is of an ordinary or a prefill replica that shares its prefixes."""
    return _sharing


def stepping() -> Stepping | None:
    """This process's, where it sends what it computes on a GPU."""
    return _stepping


def join(_: Any, scheduler: Any) -> None:
    """After `Scheduler.init_disaggregation`: before any request.

    Raises:
        LaunchError: no agent, or this is not the SGLang that the plug-in knows. The scheduler
            ends, and its server with it.
    """
    global _board, _sharing, _stepping
    logging.getLogger("pdctl").setLevel(logging.INFO)
    _check_hooks()
    session = Session(
        os.environ,
        scheduler.server_args.port,
        engine=Engine.SGLANG,
        served_path=SERVED_PATH,
        counters=lambda: _counters(scheduler),
    )
    assigned = session.attach()
    _board = session.board
    pool = _pool(scheduler, assigned)
    if assigned.role is not Role.BOTH:
        queue = scheduler.disagg_prefill_bootstrap_queue or scheduler.disagg_decode_prealloc_queue
        queue.kv_manager.join(session, pool, scheduler)
    _open(session, loaded(scheduler), pool)
    # a prefill replica without a radix cache hands over all the same; decode asks for itself
    caches = not scheduler.server_args.disable_radix_cache
    looks = assigned.role is Role.BOTH or (assigned.role is Role.PREFILL and caches)
    if pool is not None and session.store is not None and looks:
        _sharing = _opened_sharing(scheduler, session.store, pool, assigned.contract)
    if assigned.role is Role.PREFILL and pool is not None and pool.leaves_by_layer:
        _stepping = _opened_stepping(pool)
    atexit.register(session.close)


def _open(session: Session, found: Loaded, pool: SlotPool | None) -> None:
    if pool is None:
        session.open(found)
        return
    atexit.register(pool.close)
    try:
        session.open(found, pool.page_memory, pool.lock, pool.device)
    except MemoryError as error:
        hint = "lower handoff.buffer_bytes, or engine_config.mem_fraction_static"
        raise LaunchError(str(error), hint=hint) from error


def _opened_stepping(pool: Any) -> Stepping:
    from pdctl.engines.sglang.stepping import Stepping

    return Stepping(pool)


def _opened_sharing(
    scheduler: Any, store: PageStore, pool: SlotPool, contract: Contract
) -> Sharing:
    from pdctl.engines.sglang.tree import Tree

    if scheduler.server_args.disable_radix_cache:
        raise LaunchError(
            "prefixes can't be shared without SGLang's radix cache",
            hint="leave engine_config.disable_radix_cache or [sharing] away",
        )
    return Sharing(scheduler, store, pool, Tree(scheduler, pool), PageGeometry.of(contract))


def _pool(scheduler: Any, assigned: Assignment) -> SlotPool | None:
    """None where pdctl moves nothing in or out of it."""
    if assigned.native or (assigned.role is Role.BOTH and assigned.store is None):
        return None
    try:
        return open_pool(scheduler, PageGeometry.of(assigned.contract))
    except (AttributeError, ValueError) as error:
        raise LaunchError(f"SGLang's KV memory can't be converted: {error}") from error


def _check_hooks() -> None:
    """SGLang logs a hook that can't be applied, and goes on without it."""
    import pkgutil

    from pdctl.engines.sglang.hooks import HOOKS

    for hook in HOOKS:
        if not hasattr(pkgutil.resolve_name(hook.target), "__wrapped__"):
            raise LaunchError(f"SGLang did not apply the hook on {hook.target}")


def _counters(scheduler: Any) -> Counters:
    """On the attachment's thread, while the scheduler goes on: a look, not a lock."""
    running = {id(req) for req in scheduler.running_batch.reqs}
    if scheduler.chunked_req is not None:
        running.add(id(scheduler.chunked_req))
    waiting = sum(_length(getattr(scheduler, name, None)) for name in QUEUES)
    return msgspec.structs.replace(_board.read(), requests_active=len(running) + waiting)


def _length(queue: Any) -> int:
    return len(getattr(queue, "queue", queue) or ())
