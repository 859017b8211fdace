"""`python -m pdctl.engines.sglang.probe MODEL_DIR DTYPE`: one JSON `Probe` on stdout.

Runs in the replica's own environment and builds SGLang's model configuration, so that what it
reads from config.json is what is reported; no weight is read. DTYPE is `--dtype`'s value.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pdctl.engines.declared import known_positions
from pdctl.engines.interface import Probe
from pdctl.engines.probing import Findings, answer, probed


def engine_version() -> str:
    return version("sglang")


def probe(model_dir: Path, dtype: str) -> Probe:
    """What SGLang would make of this checkpoint; problems are collected, never raised."""

    def look(found: Findings) -> None:
        config = _model_config(model_dir, dtype)
        positions = known_positions(config.hf_text_config)
        found.effective = {"attention": _attention(config), "positions": positions}

    return probed("SGLang", engine_version(), look)


def _model_config(model_dir: Path, dtype: str) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig(model_path=str(model_dir), dtype=dtype)


def _attention(config: Any) -> dict[str, Any]:
    return {
        "kind": "sliding" if getattr(config, "is_hybrid_swa", False) else "full",
        "layers": int(config.num_hidden_layers),
        "kv_heads": int(config.get_total_num_kv_heads()),
        "head_dim": int(config.head_dim),
    }


def main() -> None:
    model_dir, dtype = sys.argv[1:3]
    answer(lambda: probe(Path(model_dir).expanduser(), dtype))


if __name__ == "__main__":
    main()
