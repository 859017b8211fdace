"""From an engine's name to its spec, imported when asked for."""

from __future__ import annotations

from functools import cache

from pdctl.engines.interface import EngineSpec
from pdctl.topology.model import Engine


@cache
def spec_for(engine: Engine) -> EngineSpec:
    """The control side of one engine."""
    if engine is Engine.MLX:
        from pdctl.engines.mlx.spec import MlxSpec

        return MlxSpec()
    if engine is Engine.VLLM:
        from pdctl.engines.vllm.spec import VllmSpec

        return VllmSpec()
    from pdctl.engines.sglang.spec import SglangSpec

    return SglangSpec()
