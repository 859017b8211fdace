"""What vLLM computes positions with: as its configuration says, and as the loaded model does."""

from __future__ import annotations

from typing import Any

from pdctl.engines.declared import declared_positions
from pdctl.engines.session import Loaded
from pdctl.engines.vllm.probe import engine_version
from pdctl.topology.contract import Attention
from pdctl.topology.model import ComputeDtype


def loaded(config: Any, layers: int, block_tokens: int) -> Loaded:
    """Of the model that this process serves.

    Args:
        config: vLLM's whole configuration.
        layers: how many have KV memory.
    """
    model = config.model_config
    theta = loaded_rope_theta()
    positions = declared_positions(model.hf_text_config)
    sliding = model.get_sliding_window()
    return Loaded(
        engine_version=engine_version(),
        attention=Attention(
            kind="sliding" if sliding else "full",
            layers=layers,
            kv_heads=model.get_total_num_kv_heads(),
            head_dim=model.get_head_size(),
        ),
        positions={
            **positions,
            "rope_theta": positions["rope_theta"] if theta is None else theta,
            "context_length": model.max_model_len,
        },
        compute_dtype=ComputeDtype(str(model.dtype).removeprefix("torch.")),
        block_tokens=block_tokens,
    )


def loaded_rope_theta() -> float | None:
    """The base of the rotary embeddings that this process has built; None where there is none
    or more than one. vLLM keeps one object per distinct set of parameters (0.28 to 0.32)."""
    from vllm.model_executor.layers import rotary_embedding

    built = getattr(rotary_embedding, "_ROPE_DICT", {})
    bases = {float(rope.base) for rope in built.values()}
    return bases.pop() if len(bases) == 1 else None
