"""The bench of the transfer alone, with host memory in a device's place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pdctl.handoff.transport.nixl import installed

pytest.importorskip("torch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(installed() is None, reason="needs nixl in this environment"),
]

PROGRAM = Path(__file__).parents[2] / "bench" / "gpu_transfer.py"
LIMIT_S = 300


def test_it_measures_every_way_and_compares_the_bits_first(tmp_path: Path) -> None:
    """Two processes; each way has a figure, and what was not measured is named."""
    words = ["--device", "host", "--shapes", "tiny", "--lens", "130,700", "--repetitions", "1"]
    argv = [sys.executable, str(PROGRAM), *words, "--output", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = (json.loads(path.read_text()) for path in tmp_path.glob("*-gpu-transfer-host.json"))
    assert found["left_out"] == []
    for row, pages in zip(found["results"]["tiny"], (3, 11), strict=True):
        assert row["bytes"] == pages * 4 * 64 * 2 * 2 * 64 * 2
        assert set(row["ms"]) == set(row["gb_per_s"])
        assert all(ms > 0 for ms in [*row["ms"].values(), *row["cpu_ms"].values()])
        assert row["host_bytes"] == 0
