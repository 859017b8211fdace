"""config.json by meaning: both spellings, derived defaults, refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdctl.topology.checkpoint import Checkpoint, check_context, is_quantised, read_checkpoint

BASE: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}


def write(folder: Path, **changes: Any) -> Path:
    """A directory with BASE changed; a value of ... drops the key."""
    config = {k: v for k, v in {**BASE, **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def meaning(folder: Path, **changes: Any) -> Checkpoint:
    checkpoint, found = read_checkpoint(write(folder, **changes))
    assert checkpoint is not None, found
    return checkpoint


def refusal(folder: Path, **changes: Any) -> str:
    checkpoint, found = read_checkpoint(write(folder, **changes))
    assert checkpoint is None
    assert {d.code for d in found} <= {"topology.model_unsupported", "topology.model_garbled"}
    return "; ".join(d.summary for d in found)


def test_both_spellings_of_rope_mean_the_same(tmp_path: Path) -> None:
    """rope_theta at the top or under rope_parameters; type or rope_type; whole or real numbers."""
    old = meaning(tmp_path, rope_scaling={"type": "linear", "factor": 8})
    new = meaning(
        tmp_path,
        rope_theta=...,
        rope_parameters={"factor": 8.0, "rope_type": "linear", "rope_theta": 1e6},
    )
    assert old == new
    assert old.scaling == {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": {"rope_type": "linear", "factor": 1}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
        {"head_dim": None},
        {"head_dim": 64},
        {"architectures": ...},
        {"model_type": ...},
        {"torch_dtype": "x", "transformers_version": "0", "sliding_window": 4096},
        {"use_sliding_window": False, "layer_types": ["full_attention"] * 24},
    ],
)
def test_what_only_reads_differently_changes_nothing(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Plain RoPE, derived defaults and cosmetic keys: one meaning."""
    assert meaning(tmp_path, **changes) == meaning(tmp_path)


def test_null_values_give_the_derived_defaults(tmp_path: Path) -> None:
    """R32: null head_dim and null or missing KV heads."""
    attention = meaning(tmp_path, num_key_value_heads=None, head_dim=None).attention
    assert (attention.kv_heads, attention.head_dim) == (14, 64)
    assert meaning(tmp_path, rope_theta=...).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM is not served"),
        ({"model_type": "llama"}, 'model_type "llama" and architecture Qwen2ForCausalLM disagree'),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantised"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"vision_config": {"depth": 2}}, "vision"),
        ({"num_experts": 8}, "mixture-of-experts"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "different values"),
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "24"}, "num_hidden_layers is"),
        ({"num_key_value_heads": 3}, "can't share 3 KV heads"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """R53: unknown, quantised, sliding-window, vision and expert models, and garbled values."""
    assert words in refusal(tmp_path, **changes)


def test_a_lora_adapter_is_refused_by_name(tmp_path: Path) -> None:
    """R53: an adapter beside the weights is not silently ignored."""
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "LoRA" in refusal(tmp_path)


@pytest.mark.parametrize(
    "value",
    [None, {}, False, "", "none", {"quant_method": None}, {"quant_method": "none"},
     {"quant_method": None, "bits": None, "load_in_4bit": False}, {"load_in_8bit": False}],
)  # fmt: skip
def test_unquantised_has_many_spellings(tmp_path: Path, value: object) -> None:
    """R50: each of them is accepted."""
    assert not is_quantised(value)
    assert meaning(tmp_path, quantization_config=value) == meaning(tmp_path)


@pytest.mark.parametrize("value", [{"quant_method": "gptq"}, {"bits": 8}, {"load_in_4bit": True},
                                   {"quant_method": None, "bits": 4}, "fp8", True])  # fmt: skip
def test_quantised_is_recognised(value: object) -> None:
    assert is_quantised(value)


def test_a_context_beyond_the_positions_is_refused(tmp_path: Path) -> None:
    """The message names both numbers; the limit itself is fine."""
    checkpoint = meaning(tmp_path)
    assert check_context(checkpoint, 32768) == []
    (found,) = check_context(checkpoint, 32769)
    assert "32769" in found.summary
    assert "32768" in found.summary


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_garbled_config_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    (found,) = read_checkpoint(tmp_path)[1]
    assert found.code == "topology.model_garbled"
    assert "config.json" in found.summary


def test_missing_directories_and_files_are_named(tmp_path: Path) -> None:
    assert "no directory" in read_checkpoint(tmp_path / "absent")[1][0].summary
    assert "config.json" in read_checkpoint(tmp_path)[1][0].summary


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(
    st.sampled_from([*BASE, "rope_scaling", "rope_parameters", "layer_types", "head_dim"]),
    VALUES | st.lists(VALUES, max_size=2) | st.dictionaries(
        st.sampled_from(["type", "rope_type", "rope_theta", "factor"]), VALUES),
))  # fmt: skip
def test_no_config_makes_the_reader_raise(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Whatever stands in config.json, the outcome is a meaning or a diagnostic."""
    checkpoint, found = read_checkpoint(write(tmp_path, **changes))
    assert (checkpoint is None) == bool(found)
