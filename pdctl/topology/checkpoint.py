"""The meaning of a checkpoint's config.json: defaults derived, both spellings understood.

Everything that pdctl can't serve is refused here by name, before an engine sees it (R53).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pdctl.topology.contract import Attention, Positions
from pdctl.topology.diagnostics import Diagnostic

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""model_type (MLX chooses by it) → architecture (vLLM and SGLang choose by it)."""

_MAX_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
_ROPE_THETA = 10000.0
"""Defaults of transformers' configuration classes, which every engine but MLX starts from."""

_MAX_CONFIG_BYTES = 16 << 20

NO_CHECKPOINT = (
    "give a checkpoint's directory, which holds config.json; `pdctl demo-model` makes a small one"
)


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a config.json means."""

    architecture: str
    attention: Attention
    rope_theta: float
    scaling: dict[str, Any] | None
    max_positions: int
    arithmetic: dict[str, str]
    """Other values that the forward pass computes with; part of the weights' fingerprint."""

    def positions(self, context_length: int) -> Positions:
        return Positions(
            rope_theta=self.rope_theta,
            scaling=self.scaling,
            max_positions=self.max_positions,
            context_length=context_length,
        )


class _Garbled(Exception):
    """A value that config.json may not have; the text is the sentence."""


def read_checkpoint(model_dir: Path) -> tuple[Checkpoint | None, list[Diagnostic]]:
    """Reads config.json of a local checkpoint's directory; weights are not touched.

    Never raises for what is on the disk. The checkpoint is None when a diagnostic is an error.
    """
    path = model_dir / "config.json"
    if not model_dir.is_dir():
        return None, [_problem("missing", f"there is no directory {model_dir}", NO_CHECKPOINT)]
    try:
        config = read_json(path)
    except FileNotFoundError:
        return None, [_problem("missing", f"there is no file {path}", NO_CHECKPOINT)]
    except ValueError as error:
        return None, [_problem("garbled", str(error))]
    found = [
        _problem("unsupported", f"{path}: {reason}", hint)
        for reason, hint in _refusals(config, model_dir)
    ]
    if found:
        return None, found
    try:
        return _meaning(config), []
    except _Garbled as error:
        return None, [_problem("garbled", f"{path}: {error}")]


def check_context(checkpoint: Checkpoint, context_length: int) -> list[Diagnostic]:
    """Refuses a context that the checkpoint's positions don't cover."""
    if context_length <= checkpoint.max_positions:
        return []
    return [
        Diagnostic(
            code="topology.context_length",
            summary=f"model: context_length {context_length} is beyond the checkpoint's "
            f"{checkpoint.max_positions} positions",
            field="model.context_length",
            hint=f"write context_length = {checkpoint.max_positions} or less",
        )
    ]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it can't be read or is no JSON object; the text names the file.
    """
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES << 4:
            raise ValueError(f"{path} is too large")
        parsed = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} is not a JSON object")
    return parsed


def is_quantised(value: object) -> bool:
    """Whether a `quantization_config` (or `quantization`) says so.

    "Not quantised" is spelled null, {}, false, "none", {"quant_method": null}, … (R50).
    """
    if isinstance(value, str):
        return value.lower() not in ("", "none", "unquantized", "unquantised")
    if not isinstance(value, dict):
        return bool(value)
    said = {k: v for k, v in value.items() if v is not None and v is not False and v != ""}
    if "quant_method" in value and not is_quantised(str(value["quant_method"] or "")):
        return any(said.get(key) for key in ("bits", "load_in_8bit", "load_in_4bit"))
    return bool(said)


def _refusals(config: dict[str, Any], model_dir: Path) -> Iterator[tuple[str, str | None]]:
    """Everything that this checkpoint is and pdctl does not serve: (reason, hint)."""
    kind = config.get("model_type")
    architecture = _architecture(config)
    served = ", ".join(ARCHITECTURES.values())
    if config.get("vision_config") or config.get("audio_config"):
        yield "vision and audio models are not served", "use the text-only checkpoint"
    if any(_number(config.get(key)) > 1 for key in _EXPERTS):
        yield "mixture-of-experts models are not served", None
    if architecture not in ARCHITECTURES.values():
        yield f"architecture {architecture or kind} is not served", f"served: {served}"
    elif kind is not None and ARCHITECTURES.get(str(kind)) != architecture:
        yield f'model_type "{kind}" and architecture {architecture} disagree', None
    for key in ("quantization_config", "quantization", "compression_config"):
        if is_quantised(config.get(key)):
            yield f"quantised checkpoints are not served ({key})", "use the unquantised weights"
            break
    if _slides(config, architecture):
        yield "sliding-window attention is not served", "use_sliding_window = false would do"
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapters.safetensors"):
        if (model_dir / name).exists():
            yield f"LoRA adapters are not served ({name})", "merge the adapter into the weights"
            break


def _architecture(config: dict[str, Any]) -> str | None:
    names = config.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    return ARCHITECTURES.get(str(config.get("model_type")))


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _slides(config: dict[str, Any], architecture: str | None) -> bool:
    layers = config.get("layer_types")
    if isinstance(layers, list) and any(kind != "full_attention" for kind in layers):
        return True
    if architecture == ARCHITECTURES["llama"]:
        return bool(config.get("sliding_window"))
    return bool(config.get("use_sliding_window"))


def _meaning(config: dict[str, Any]) -> Checkpoint:
    architecture = _architecture(config)
    assert architecture is not None, "refused before"
    kind = next(k for k, v in ARCHITECTURES.items() if v == architecture)
    heads = _positive(config, "num_attention_heads", None)
    kv_heads = _positive(config, "num_key_value_heads", heads)
    hidden = _positive(config, "hidden_size", None)
    if heads % kv_heads:
        raise _Garbled(f"{heads} attention heads can't share {kv_heads} KV heads")
    fallback = 128 if kind == "qwen3" and "head_dim" not in config else hidden // heads
    theta, scaling = _rope(config)
    return Checkpoint(
        architecture=architecture,
        attention=Attention(
            kind="full",
            layers=_positive(config, "num_hidden_layers", None),
            kv_heads=kv_heads,
            head_dim=_positive(config, "head_dim", fallback),
        ),
        rope_theta=theta,
        scaling=scaling,
        max_positions=_positive(config, "max_position_embeddings", _MAX_POSITIONS[kind]),
        arithmetic=_arithmetic(config, architecture, heads),
    )


def _positive(config: dict[str, Any], key: str, fallback: int | None) -> int:
    """A whole number above zero; null counts as missing (R32)."""
    value = config.get(key)
    if value is None:
        if fallback is None:
            raise _Garbled(f"{key} is missing")
        return fallback
    if type(value) is not int or not 0 < value < 1 << 31:
        raise _Garbled(f"{key} is {json.dumps(value)[:40]}, not a whole number above 0")
    return value


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(theta, canonical scaling) from either spelling."""
    tables = []
    for key in ("rope_parameters", "rope_scaling"):
        table = config.get(key)
        if table is not None and not isinstance(table, dict):
            raise _Garbled(f"{key} is not an object")
        tables.append(table or {})
    thetas = {
        float(value)
        for table in (config, *tables)
        if (value := table.get("rope_theta")) is not None and _is_theta(value)
    }
    if len(thetas) > 1:
        raise _Garbled(f"rope_theta is written twice, with different values: {sorted(thetas)}")
    factor = config.get("partial_rotary_factor", tables[0].get("partial_rotary_factor"))
    if factor not in (None, 1, 1.0):
        raise _Garbled("partial rotary embeddings are not served (partial_rotary_factor)")
    scalings = [found for table in tables if (found := canonical_scaling(table)) is not None]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise _Garbled("rope_parameters and rope_scaling disagree")
    return thetas.pop() if thetas else _ROPE_THETA, scalings[0] if scalings else None


def _is_theta(value: object) -> bool:
    if type(value) in (int, float) and math.isfinite(value) and value > 0:  # type: ignore[arg-type,operator]
        return True
    raise _Garbled(f"rope_theta is {json.dumps(value)[:40]}, not a number above 0")


def canonical_scaling(table: dict[str, Any]) -> dict[str, Any] | None:
    """One spelling for scaled RoPE: `rope_type`, floats, sorted keys; None for plain RoPE."""
    kind = table.get("rope_type") or table.get("type") or "default"
    left_out = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    rest = {k: _plain(v) for k, v in sorted(table.items()) if k not in left_out and v is not None}
    if kind == "default" or (kind == "linear" and rest.get("factor") == 1.0):
        return None
    return {"rope_type": kind, **rest}


def _plain(value: object) -> object:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return value


def _arithmetic(config: dict[str, Any], architecture: str, heads: int) -> dict[str, str]:
    eps = config.get("rms_norm_eps")
    eps = 1e-6 if eps is None else eps
    if type(eps) not in (int, float) or not 0 <= eps < 1:
        raise _Garbled(f"rms_norm_eps is {json.dumps(eps)[:40]}, not a small number")
    single = struct.pack("<f", eps).hex()
    return {
        "architecture": architecture,
        "attention_bias": str(bool(config.get("attention_bias"))),
        "hidden_act": str(config.get("hidden_act") or "silu"),
        "mlp_bias": str(bool(config.get("mlp_bias"))),
        "num_attention_heads": str(heads),
        "rms_norm_eps": single,
        "tie_word_embeddings": str(bool(config.get("tie_word_embeddings"))),
    }


def _problem(code: str, summary: str, hint: str | None = None) -> Diagnostic:
    return Diagnostic(code=f"topology.model_{code}", summary=summary, hint=hint)
