"""What mlx-lm makes of a checkpoint's config.json, read back from the model it built.

mlx-lm's argument classes take known top-level keys and ignore the rest without a word: its
Llama falls back to rope_theta 10000 and its Qwen2 to 1000000 where transformers 5 wrote the
value under `rope_parameters` only (0.31.3 and 0.32.2; Qwen3 refuses that in 0.31.3 and reads
it in 0.32.2). So values are taken from the built model, never from the file.
"""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from pdctl.topology.checkpoint import canonical_scaling

FAMILIES = ("llama", "qwen2", "qwen3")


def read_attention(model: Any) -> dict[str, Any]:
    """`Attention` as a dict, from the modules themselves. No weight is evaluated."""
    attention = model.layers[0].self_attn
    kv_heads = attention.n_kv_heads
    return {
        "kind": "sliding" if has_sliding_window(model) else "full",
        "layers": len(model.layers),
        "kv_heads": kv_heads,
        "head_dim": attention.k_proj.weight.shape[0] // kv_heads,
    }


def read_positions(model: Any) -> dict[str, Any]:
    """`Positions` as a dict, without `context_length`, which is the topology's, and without
    `max_positions` where the checkpoint names none: mlx-lm needs none then."""
    args = model.args
    rope = model.layers[0].self_attn.rope
    base = rope.base if isinstance(rope, nn.RoPE) else args.rope_theta
    found = {"rope_theta": float(base), "scaling": canonical_scaling(args.rope_scaling or {})}
    if args.max_position_embeddings is not None:
        found["max_positions"] = args.max_position_embeddings
    return found


def has_sliding_window(model: Any) -> bool:
    return any(getattr(layer, "use_sliding", False) for layer in model.layers)
