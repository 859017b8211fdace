"""`python -m pdctl.engines.sglang.probe MODEL_DIR DTYPE`: one JSON `Probe` on stdout.

Runs in the replica's own environment and builds SGLang's model configuration, so that what it
reads from config.json is what is reported; no weight is read. DTYPE is `--dtype`'s value.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from pdctl import __version__
from pdctl.engines.declared import known_positions
from pdctl.engines.interface import Probe


def engine_version() -> str:
    return version("sglang")


def probe(model_dir: Path, dtype: str) -> Probe:
    """What SGLang would make of this checkpoint; problems are collected, never raised."""
    problems: list[str] = []
    effective: dict[str, Any] | None = None
    try:
        config = _model_config(model_dir, dtype)
        positions = known_positions(config.hf_text_config)
        effective = {"attention": _attention(config), "positions": positions}
    # A foreign library meets a foreign file: whatever it raises is the answer.
    except Exception as error:
        said = " ".join(str(error).split())
        problems.append(f"SGLang cannot read this checkpoint: {type(error).__name__}: {said[:300]}")
    return Probe(
        engine_version=engine_version(),
        pdctl_version=__version__,
        python_version=platform.python_version(),
        effective=effective,
        problems=tuple(problems),
    )


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
    # SGLang logs to stdout at import, which is the answer's alone
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = probe(Path(model_dir).expanduser(), dtype)
    with answer_to:
        answer_to.write(msgspec.json.encode(answer).decode() + "\n")


if __name__ == "__main__":
    main()
