"""Every example and every starter is a topology without a single diagnostic."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdctl.topology.load import load
from pdctl.topology.plan import derive

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "examples/topologies").glob("*.toml"),
                *(ROOT / "pdctl/cli/starters").glob("*.toml")])  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_an_example_loads_and_plans(path: Path) -> None:
    """Nothing is wrong with it, and a plan follows."""
    topology, found = load(path)
    assert found == []
    assert topology is not None
    assert len(derive(topology).replicas) == len(topology.replicas)


def test_the_examples_are_there() -> None:
    assert {"mlx-demo", "mlx-to-mlx", "mlx-2p2d"} <= {path.stem for path in FILES}
