"""`python -m engine.witness_mlx`: pdctl's server for MLX, which also writes down what a
request's caches hold, once its prompt's last forward has ended.

    [layers, 2, kv_heads, tokens, head_dim]
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from engine import witness

from pdctl.engines.mlx import loop, server, versions
from pdctl.engines.mlx.batch import Batch
from pdctl.engines.mlx.call import Call


class WitnessBatch(Batch):
    def _progressed(self, call: Call, progress: Any) -> None:
        if progress.end_of_prompt and call.room is not None and witness.wanted():
            first = versions.first_token(self._generator, progress.uid)
            witness.write(call.room, held(first.caches, first.row, len(call.prompt.tokens)))
        super()._progressed(call, progress)


def held(caches: list[Any], row: int, tokens: int) -> np.ndarray:
    start = int(caches[0].left_padding[row].item())
    pairs = [mx.stack([cache.keys[row], cache.values[row]]) for cache in caches]
    memory = mx.contiguous(mx.stack(pairs)[:, :, :, start : start + tokens])
    mx.eval(memory)
    return np.array(memory)


if __name__ == "__main__":
    loop.Batch = WitnessBatch
    server.main()
