"""`python -m pdctl.engines.mlx.probe MODEL_DIR`: one JSON `Probe` on stdout.

Runs in the replica's own environment. Builds mlx-lm's model lazily, so that what mlx-lm reads
from config.json is what is reported; no weight is read and nothing is evaluated.
"""

from __future__ import annotations

import json
import struct
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pdctl.engines.interface import Probe
from pdctl.engines.mlx.effective import FAMILIES, read_attention, read_positions
from pdctl.engines.probing import Findings, answer, probed


def probe(model_dir: Path) -> Probe:
    """What mlx-lm would make of this checkpoint; problems are collected, never raised."""

    def look(found: Findings) -> None:
        config = json.loads((model_dir / "config.json").read_bytes())
        found.problems += _refused(config)
        model = _build(model_dir)
        found.effective = {"attention": read_attention(model), "positions": read_positions(model)}
        found.problems += _misread(config, model, model_dir)

    return probed("mlx-lm", version("mlx-lm"), look)


def _build(model_dir: Path) -> Any:
    from mlx_lm import utils

    config = utils.load_config(model_dir)
    model_class, args_class = utils._get_classes(config)
    return model_class(args_class.from_dict(config))


def _refused(config: dict[str, Any]) -> list[str]:
    found = []
    family = config.get("model_type")
    if family not in FAMILIES:
        found.append(f'model_type "{family}" is not served; MLX serves {", ".join(FAMILIES)}')
    if config.get("model_file"):
        found.append("model_file asks for code from the checkpoint to be run")
    if config.get("quantization") or config.get("quantization_config"):
        found.append("the checkpoint is quantised")
    return found


def _misread(config: dict[str, Any], model: Any, model_dir: Path) -> list[str]:
    """Values that mlx-lm would take from a default, silently, where the file has others."""
    found = []
    nested = config.get("rope_parameters") or {}
    theta = config.get("rope_theta", nested.get("rope_theta"))
    used = read_positions(model)["rope_theta"]
    if theta is not None and float(theta) != used:
        found.append(
            f"rope_theta is {theta:g} in config.json, but mlx-lm {version('mlx-lm')} uses"
            f" {used:g}: it reads the top level only; copy it there from rope_parameters"
        )
    tied = getattr(model.args, "tie_word_embeddings", False)
    if tied and "tie_word_embeddings" not in config and _has_tensor(model_dir, "lm_head.weight"):
        found.append(
            "config.json does not say tie_word_embeddings, and mlx-lm would ignore lm_head.weight"
        )
    return found


def _has_tensor(model_dir: Path, name: str) -> bool:
    return any(name in _tensor_names(path) for path in model_dir.glob("model*.safetensors"))


def _tensor_names(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    return header


def main() -> None:
    answer(lambda: probe(Path(sys.argv[1]).expanduser()))


if __name__ == "__main__":
    main()
