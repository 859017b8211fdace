"""The bench of the transfer alone, with host memory in a device's place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pdctl.handoff.transport.nixl import installed

pytest.importorskip("torch")

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[2] / "bench" / "gpu_transfer.py"
LIMIT_S = 300
WORDS = ["--device", "host", "--shapes", "tiny", "--lens", "130,700", "--repetitions", "1"]


def run(*words: str) -> None:
    argv = [sys.executable, str(PROGRAM), *WORDS, *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(installed() is None, reason="needs nixl in this environment")
def test_it_measures_every_way_and_compares_the_bits_first(tmp_path: Path) -> None:
    """Two processes; each way has a figure, and what was not measured is named."""
    run("--output", str(tmp_path))
    (found,) = (json.loads(path.read_text()) for path in tmp_path.glob("*-gpu-transfer-host.json"))
    assert found["left_out"] == []
    for row, pages in zip(found["results"]["tiny"], (3, 11), strict=True):
        assert row["bytes"] == pages * 4 * 64 * 2 * 2 * 64 * 2
        assert set(row["ms"]) == set(row["gb_per_s"])
        assert all(ms > 0 for ms in [*row["ms"].values(), *row["cpu_ms"].values()])
        assert row["host_bytes"] == 0


def test_over_tcp_it_counts_pieces_and_what_each_takes_of_a_core(tmp_path: Path) -> None:
    """Pages that have landed leave as one piece each, where they are small; those that land in
    groups of layers as several. Copies move what handoffs did."""
    pytest.importorskip("triton")
    run("--transport", "tcp", "--output", str(tmp_path))
    (path,) = tmp_path.glob("*-gpu-transfer-tcp-host.json")
    found = json.loads(path.read_text())
    assert found["left_out"] == []
    for row, pages in zip(found["results"]["tiny"], (3, 11), strict=True):
        ways = row["ways"]
        assert row["bytes"] == pages * 4 * 64 * 2 * 2 * 64 * 2
        assert ways["landed, apart"]["pieces"] == ways["landed, inside"]["pieces"] == pages
        assert ways["by layer, apart"]["pieces"] >= pages
        assert ways["framed copy, landed"]["pieces"] == ways["scatter, landed"]["pieces"] == pages
        assert all(way["ms"] > 0 for way in ways.values())
        assert ways["by layer, apart"]["ms"] >= 4 * row["layer_ms"]
        for place in ("apart", "inside"):
            assert ways[f"by layer, {place}"]["after_last_ms"] > 0
