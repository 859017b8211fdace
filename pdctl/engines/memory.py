"""What a replica needs of its host's or device's memory, estimated for validate. Pure."""

from __future__ import annotations

from pdctl.topology.contract import Contract
from pdctl.topology.model import ComputeDtype
from pdctl.topology.plan import ReplicaPlan

SEQUENCES_ASSUMED = 2
"""Whole contexts that are allowed for where the topology does not say how many."""


def needed_bytes(
    replica: ReplicaPlan,
    contract: Contract,
    weights_bytes: int,
    *,
    processes_bytes: int,
    kv_tokens: int | None = None,
    kv_bytes: int | None = None,
) -> int:
    """Weights and KV take twice their size where a replica computes in float32.

    Args:
        processes_bytes: of the engine's processes, before any weight.
        kv_tokens: how many the topology gives the KV cache; None: it does not say.
        kv_bytes: the same as bytes, which nothing widens.
    """
    widening = 2 if replica.compute_dtype is ComputeDtype.FLOAT32 else 1
    if kv_tokens is None:
        kv_tokens = contract.positions.context_length * SEQUENCES_ASSUMED
    if kv_bytes is None:
        kv_bytes = widening * contract.token_kv_bytes * kv_tokens
    return processes_bytes + widening * weights_bytes + kv_bytes
