"""What vLLM computes positions with: as its configuration says, and as the loaded model does."""

from __future__ import annotations

from pdctl.engines.declared import declared_positions

__all__ = ["declared_positions", "loaded_rope_theta"]


def loaded_rope_theta() -> float | None:
    """The base of the rotary embeddings that this process has built; None where there is none
    or more than one. vLLM keeps one object per distinct set of parameters (0.28 to 0.32)."""
    from vllm.model_executor.layers import rotary_embedding

    built = getattr(rotary_embedding, "_ROPE_DICT", {})
    bases = {float(rope.base) for rope in built.values()}
    return bases.pop() if len(bases) == 1 else None
