"""What vLLM computes positions with: as its configuration says, and as the loaded model does."""

from __future__ import annotations

from typing import Any

from pdctl.topology.checkpoint import canonical_scaling


def declared_positions(config: Any) -> dict[str, Any]:
    """`Positions` as a dict from transformers' configuration object, as vLLM's models read it
    (`rope_parameters`, into which transformers 5 also moves a top-level `rope_theta`)."""
    table = dict(getattr(config, "rope_parameters", None) or {})
    theta = table.get("rope_theta", getattr(config, "rope_theta", None))
    return {
        "rope_theta": None if theta is None else float(theta),
        "scaling": canonical_scaling(table),
        "max_positions": getattr(config, "max_position_embeddings", None),
    }


def loaded_rope_theta() -> float | None:
    """The base of the rotary embeddings that this process has built; None where there is none
    or more than one. vLLM keeps one object per distinct set of parameters (0.28 to 0.32)."""
    from vllm.model_executor.layers import rotary_embedding

    built = getattr(rotary_embedding, "_ROPE_DICT", {})
    bases = {float(rope.base) for rope in built.values()}
    return bases.pop() if len(bases) == 1 else None
