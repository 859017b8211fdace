"""The programs under bench/ are no package: they import each other by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

CONFIG = {
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
}


@pytest.fixture
def site(tmp_path: Path) -> Callable[..., Any]:
    """Makes a `Site`; no engine of it is started."""
    from gpu_engines import ENGINES, Site

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def made(**given: Any) -> Any:
        usual: dict[str, Any] = {"device": "cuda", "graphs": False, "pool_tokens": 65536}
        return Site(
            model=tmp_path,
            logs=tmp_path,
            pythons={engine: f"/opt/{engine}/bin/python" for engine in ENGINES},
            lanes=32,
            context_length=8192,
            **{**usual, **given},
        )

    return made
