"""From a Llama GGUF to a Hugging Face checkpoint in FP16: weights, config, tokenizer.

Everything is taken from the GGUF's own metadata; numpy and gguf suffice. Three facts matter:
GGUF interleaves the rows of each Q and K head for its RoPE, and Hugging Face has the two
halves one after the other; mlx-lm reads `rope_theta` at config.json's top level only; and the
token that ends an answer is `<|im_end|>`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf_file: Path, folder: Path) -> None:
    """Writes model.safetensors, config.json, generation_config.json, tokenizer.json,
    tokenizer_config.json and chat_template.jinja into `folder`."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(facts)
    weights = dict(_weights(reader, config))
    target = folder / "model.safetensors"
    save_file(weights, target, metadata={"format": "pt"})
    target.chmod(0o644)
    special = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    documents = {
        "config.json": config,
        "generation_config.json": special | {"pad_token_id": config["pad_token_id"]},
        "tokenizer.json": tokenizer(facts),
        "tokenizer_config.json": tokenizer_config(facts),
    }
    for name, document in documents.items():
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    template = folder / "chat_template.jinja"
    template.write_text(facts["tokenizer.chat_template"], encoding="utf-8")


def model_config(facts: dict[str, Any]) -> dict[str, Any]:
    """config.json of a Llama, in the spelling that old and new readers understand."""
    heads = facts["llama.attention.head_count"]
    theta = float(facts["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "dtype": "float16",
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "head_dim": facts["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": facts["llama.embedding_length"],
        "initializer_range": 0.02,
        "intermediate_size": facts["llama.feed_forward_length"],
        "max_position_embeddings": facts["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": facts["llama.block_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": facts["llama.vocab_size"],
    }


def tokenizer(facts: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE as in GPT-2, from the GGUF's tokens and merges."""
    tokens = facts["tokenizer.ggml.tokens"]
    kinds = facts["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in facts["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(facts: dict[str, Any]) -> dict[str, Any]:
    tokens = facts["tokenizer.ggml.tokens"]
    return {
        "add_prefix_space": False,
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "model_max_length": facts["llama.context_length"],
        "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
    }


def _weights(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    """(Hugging Face name, FP16 array) of every tensor."""
    from gguf.quants import dequantize

    rotated = {
        "self_attn.q_proj": config["num_attention_heads"],
        "self_attn.k_proj": config["num_key_value_heads"],
    }
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float16)
        name = tensor_name(tensor.name)
        heads = next((n for part, n in rotated.items() if part in name), None)
        yield name, np.ascontiguousarray(array if heads is None else _halves(array, heads))


def tensor_name(name: str) -> str:
    """The Hugging Face name of a Llama GGUF's tensor; KeyError for one that has none."""
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if name in whole:
        return whole[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.{suffix}"


def _halves(rows: Array, heads: int) -> Array:
    """Per head: rows (0, 1), (2, 3), … as pairs → all first ones, then all second ones."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
