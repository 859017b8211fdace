"""What an engine holds, as `witness.py` wrote it down, in one order for all engines."""

from __future__ import annotations

import numpy as np

from pdctl.topology.model import Engine


def tokens_of(
    memory: np.ndarray, engine: Engine, tokens: int, *, on_gpu: bool = False
) -> np.ndarray:
    """An engine's memory as `[layers, 2, tokens, kv_heads, head_dim]`.

    vLLM's blocks on a CPU hold, per head, K transposed and then V; on a GPU, per head and token,
    K and then V.
    """
    if engine is Engine.SGLANG:
        return memory[:, :, :tokens]
    if engine is Engine.MLX:
        return memory.transpose(0, 1, 3, 2, 4)[:, :, :tokens]
    layers, blocks, heads, size, width = memory.shape
    if on_gpu:
        packed = memory.reshape(layers, blocks, heads, size, 2, width // 2)
        packed = packed.transpose(0, 4, 1, 3, 2, 5)
        return packed.reshape(layers, 2, blocks * size, heads, width // 2)[:, :, :tokens]
    halves = memory.reshape(layers, blocks, heads, 2, -1)
    keys = halves[:, :, :, 0].reshape(layers, blocks, heads, width // 2, size)
    values = halves[:, :, :, 1].reshape(layers, blocks, heads, size, width // 2)
    ordered = np.stack([keys.transpose(0, 1, 4, 2, 3), values.transpose(0, 1, 3, 2, 4)], axis=1)
    return ordered.reshape(layers, 2, blocks * size, heads, width // 2)[:, :, :tokens]


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Also of zeros with a sign; `array_equal` alone takes those for equal."""
    assert left.dtype == right.dtype
    return left.tobytes() == right.tobytes()
