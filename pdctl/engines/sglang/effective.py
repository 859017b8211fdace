"""What SGLang has really loaded, read from its scheduler."""

from __future__ import annotations

from typing import Any

from pdctl.engines.declared import declared_positions
from pdctl.engines.session import Loaded
from pdctl.engines.sglang.probe import engine_version
from pdctl.topology.contract import Attention
from pdctl.topology.model import ComputeDtype


def loaded(scheduler: Any) -> Loaded:
    """Of the model that this process serves, and of the KV memory that it made for it."""
    config = scheduler.model_config
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    positions = declared_positions(config.hf_text_config)
    theta = loaded_rope_theta()
    window = getattr(scheduler, "sliding_window_size", None)
    return Loaded(
        engine_version=engine_version(),
        attention=Attention(
            kind="sliding" if window else "full",
            layers=len(pool.k_buffer),
            kv_heads=int(pool.head_num),
            head_dim=int(pool.head_dim),
        ),
        positions={
            **positions,
            "rope_theta": positions["rope_theta"] if theta is None else theta,
            "context_length": int(config.context_len),
        },
        compute_dtype=ComputeDtype(str(config.dtype).removeprefix("torch.")),
        block_tokens=int(pool.page_size),
    )


def loaded_rope_theta() -> float | None:
    """The base of the rotary embeddings that this process has built; None where there is none
    or more than one. SGLang keeps one object per distinct set of parameters (0.5.21 to 0.5.23)."""
    from sglang.srt.layers.rotary_embedding import factory

    bases = {float(rope.base) for rope in getattr(factory, "_ROPE_DICT", {}).values()}
    return bases.pop() if len(bases) == 1 else None
