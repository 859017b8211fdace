"""Stands in for `sgl_kernel`, which has no build for a CPU without AMX, where SGLang is tested.

SGLang imports names from it at module level, takes its layers' plain torch path where the
extension's operators are absent, and calls just the two index copies below. Test support: no
replica of a user ever sees it, and none of pdctl's own code is replaced by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    slots: torch.Tensor,
    row_length: int,
) -> None:
    """Writes each request's new slots into its row of the table, one after another."""
    taken = 0
    for row, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True):
        table[row, start:stop] = slots[taken : taken + stop - start].to(table.dtype)
        taken += stop - start


def assign_extend_cache_locs_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    slots: torch.Tensor,
    row_length: int,
) -> None:
    """Reads the same back, one request after another."""
    filled = 0
    for row, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True):
        slots[filled : filled + stop - start] = table[row, start:stop].to(slots.dtype)
        filled += stop - start


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not built for this CPU")

    return absent
