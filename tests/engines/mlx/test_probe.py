"""What the probe reports of a checkpoint, without reading a weight."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import FAMILIES, ROPE_THETA, make_checkpoint

pytest.importorskip("mlx_lm")

from pdctl.engines.mlx.probe import probe
from pdctl.topology.checkpoint import read_checkpoint

SCALED = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_effective_values_equal_the_files(tmp_path: Path, family: str) -> None:
    """R56: mlx-lm and the topology read one checkpoint alike."""
    made = make_checkpoint(tmp_path / family, family)
    found = probe(made)
    assert found.problems == ()
    checkpoint, _ = read_checkpoint(made)
    assert checkpoint is not None
    effective = found.effective
    assert effective is not None
    assert effective["attention"] == {"kind": "full", "layers": 4, "kv_heads": 2, "head_dim": 64}
    assert effective["positions"] == {
        "rope_theta": checkpoint.rope_theta,
        "scaling": checkpoint.scaling,
        "max_positions": checkpoint.max_positions,
    }


@pytest.mark.parametrize(("family", "used"), [("llama", 10000.0), ("qwen2", 1000000.0)])
def test_rope_theta_under_rope_parameters_alone_is_a_problem(
    tmp_path: Path, family: str, used: float
) -> None:
    """transformers 5 writes it there only, and mlx-lm runs silently with its default."""
    nested = {"rope_type": "default", "rope_theta": ROPE_THETA}
    made = make_checkpoint(tmp_path / family, family, rope_theta=None, rope_parameters=nested)
    found = probe(made)
    assert found.effective is not None
    assert found.effective["positions"]["rope_theta"] == used
    assert any("rope_theta is 100000" in problem for problem in found.problems)


def test_scaled_rope_is_reported_in_the_contracts_spelling(tmp_path: Path) -> None:
    """R56: compared by value, whatever the file's spelling."""
    made = make_checkpoint(tmp_path / "llama", "llama", rope_scaling=SCALED)
    found = probe(made)
    checkpoint, _ = read_checkpoint(made)
    assert checkpoint is not None
    assert found.effective is not None
    assert found.effective["positions"]["scaling"] == checkpoint.scaling
    assert checkpoint.scaling is not None


def test_scaling_that_mlx_ignores_shows_in_the_effective_values(tmp_path: Path) -> None:
    """Under rope_parameters mlx-lm's Llama does not see it, so the contract differs."""
    nested = {**SCALED, "rope_theta": ROPE_THETA}
    made = make_checkpoint(tmp_path / "llama", "llama", rope_parameters=nested)
    found = probe(made)
    assert found.effective is not None
    assert found.effective["positions"]["scaling"] is None


def test_an_ignored_output_head_is_a_problem(tmp_path: Path) -> None:
    """mlx-lm ties embeddings where the file does not say; transformers does not."""
    made = make_checkpoint(tmp_path / "llama", "llama", tie_word_embeddings=None)
    assert any("lm_head" in problem for problem in probe(made).problems)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model_type": "gemma3"}, "gemma3"),
        ({"model_file": "x.py"}, "model_file"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantised"),
    ],
)
def test_what_mlx_does_not_serve_is_named(
    tmp_path: Path, changed: dict[str, object], named: str
) -> None:
    """R53: by name, and without a traceback."""
    made = make_checkpoint(tmp_path / "llama", "llama", **changed)
    assert any(named in problem for problem in probe(made).problems)


def test_a_directory_without_a_checkpoint_is_a_problem(tmp_path: Path) -> None:
    """The probe answers whatever it meets."""
    found = probe(tmp_path)
    assert found.effective is None
    assert len(found.problems) == 1
