"""What every engine's Ready says in the same way. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdctl.engines.channel import Effective
from pdctl.topology.contract import Attention, Contract, Positions
from pdctl.topology.model import ComputeDtype

UNSET_MEANS_NONE = "scaling"
"""The one of `Positions` whose None is a value: positions are not scaled."""


def effective_of(
    contract: Contract,
    attention: Attention,
    positions: Mapping[str, Any],
    compute_dtype: ComputeDtype,
) -> Effective:
    """What the engine loaded; what it does not tell of its positions is the contract's.

    Args:
        positions: fields of `Positions`; None: not told.
    """
    told = {k: v for k, v in positions.items() if v is not None or k == UNSET_MEANS_NONE}
    known = msgspec.to_builtins(contract.positions)
    return Effective(
        attention=attention,
        positions=msgspec.convert({**known, **told}, Positions),
        compute_dtype=compute_dtype,
    )


def terms_of(
    contract: Contract, *, native: bool = False, nixl: bool = False, **own: Any
) -> dict[str, Any]:
    """What a pair may negotiate; `own` is what this engine alone names."""
    transports = ["native"] if native else ["tcp", *(["nixl"] if nixl else [])]
    return {"page_tokens": contract.page_tokens, **own, "transports": transports}
