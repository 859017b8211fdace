"""What a replica's environment lacks, and what brings it there."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdctl.engines.interface import Command
from pdctl.runtime.checks.probes import run_probes
from pdctl.runtime.hosts.local import LocalHost
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.model import Engine, Replica, Role

ROOT = Path(__file__).parents[3]
ALONE = f"msgspec numpy xxhash && PYTHON -m pip install --no-deps {ROOT}"


@pytest.mark.parametrize(
    ("engine", "module", "installs"),
    [
        (Engine.MLX, "mlx_lm", f"'{ROOT}[mlx]'"),
        (Engine.VLLM, "vllm", "'vllm>=0.28.0,<0.33'"),
        (Engine.SGLANG, "sglang", "'sglang>=0.5.21,<0.5.24'"),
        (Engine.VLLM, "pdctl", ALONE),
        (Engine.SGLANG, "xxhash", ALONE),
        (Engine.VLLM, "cv2", None),
    ],
)
def test_what_is_missing_is_installed_from_where_it_is(
    engine: Engine, module: str, installs: str | None, tmp_path: Path
) -> None:
    """Engines have their range, pdctl this machine's checkout; an engine's own package, none."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho \"No module named '{module}'\" >&2; exit 1\n")
    python.chmod(0o755)
    replica = Replica(name="p0", host="local", engine=engine, role=Role.PREFILL, model="/m")
    task = (replica, LocalHost(), Command(argv=(str(python),)))
    found = run_probes([task], far=False)["p0"]
    assert isinstance(found, Diagnostic)
    hint = f"{python} -m pip install {installs}".replace("PYTHON", str(python))
    assert found.hint == (hint if installs else None)
