"""Stand-ins for vLLM's requests and schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from pdctl.engines.interface import Leg

BLOCK = 64
LEG = Leg(room=7, ticket="t", prefill="p0", decode="d0", sender="127.0.0.1:1", timeout_s=9.0)


def request(tokens: int, name: str = "r", params: Any = ...) -> Any:
    made = {"pdctl": msgspec.to_builtins(LEG)} if params is ... else params
    return SimpleNamespace(
        request_id=name,
        num_prompt_tokens=tokens,
        prompt_token_ids=list(range(tokens)),
        kv_transfer_params=made,
        cache_salt=None,
        skip_reading_prefix_cache=False,
        output_token_ids=[],
        status=SimpleNamespace(name="WAITING"),
    )


def ended(ask: Any, status: str, *outputs: int) -> Any:
    ask.status = SimpleNamespace(name=status)
    ask.output_token_ids = list(outputs)
    return ask


def schedule(
    new: dict[str, tuple[list[int], int]] | None = None,
    cached: dict[str, tuple[list[int], int]] | None = None,
    scheduled: dict[str, int] | None = None,
    resumed: tuple[str, ...] = (),
) -> Any:
    """Requests as (blocks, positions computed before)."""
    again = cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, (blocks, computed) in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(again),
            resumed_req_ids=set(resumed),
            new_block_ids=[(blocks,) if blocks else None for blocks, _ in again.values()],
            num_computed_tokens=[computed for _, computed in again.values()],
        ),
        num_scheduled_tokens=scheduled or {},
    )
