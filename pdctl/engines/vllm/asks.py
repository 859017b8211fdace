"""What the connector's scheduler half knows of one request, and what it reads from vLLM's own
objects (the names are those of 0.28.0 to 0.32.0). Pure."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator
from typing import Any

import msgspec

from pdctl.engines.interface import Leg
from pdctl.topology.model import Role

log = logging.getLogger("pdctl.engines.vllm")


class Standing(enum.Enum):
    NEW = "new"
    WAITING = "waiting"
    OPEN = "open"
    PLACED = "placed"
    FAILED = "failed"


class Ask:
    """One request that has a leg, or whose prompt the page store may have."""

    def __init__(self, role: Role, tokens: int, leg: Leg | None = None) -> None:
        self.leg = leg
        self.role = role
        self.tokens = tokens
        self.standing = Standing.WAITING
        self.available = 0
        """Once open: of the prompt's first positions, how many come from elsewhere."""
        self.local_tokens = 0
        """Positions that the engine's prefix cache held at the last look."""
        self.blocks: list[int] = []
        self.shares = True
        """Its handoff may use the page store."""
        self.sought = False
        """The page store was asked, and is to get what it lacks."""
        self.starts = False
        """Imported, and its first forward is still to come."""

    @property
    def fills(self) -> bool:
        """The worker's half waits for its blocks."""
        return self.role is Role.DECODE or self.sought

    def exports(self, computed: int) -> bool:
        """The step after which more than `computed` positions stand has some to be copied out."""
        return self.role is Role.PREFILL or (self.sought and computed < self.tokens)


def progress(scheduled: Any) -> Iterator[tuple[str, list[int], bool, int]]:
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


def released(order: Any) -> int | None:
    """The room of an order that takes a leg's place (`spec.release`)."""
    room = order.get("release") if isinstance(order, dict) else None
    return room if isinstance(room, int) else None


def leg_of(params: dict[str, Any]) -> Leg | None:
    try:
        return msgspec.convert(params["pdctl"], Leg)
    except msgspec.ValidationError as error:
        log.warning("kv_transfer_params.pdctl is not a leg: %s", error)
        return None
