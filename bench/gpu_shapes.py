"""Random checkpoints shaped like Qwen2.5-0.5B and -7B, with another model's tokenizer.

"tiny" is a shape to try programs with where there is no GPU. Every weight is drawn with a standard
deviation of 0.02 from a fixed seed; the vocabulary is the tokenizer's. Needs
torch, and draws on its GPU where there is one.

    python bench/gpu_shapes.py DIR 0.5b --tokenizer CHECKPOINT
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

SEED = 20240607
DEVIATION = 0.02
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
COMMON = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "float16",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LAYERS_PER_FILE = 7

Tensors = dict[str, torch.Tensor]


def config_of(shape: str, vocabulary: int) -> dict[str, Any]:
    return {**COMMON, **SHAPES[shape], "vocab_size": vocabulary}


def shards(config: dict[str, Any]) -> Iterator[Tensors]:
    """The checkpoint's tensors, one file's worth at a time."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(SEED)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    narrow = head * config["num_key_value_heads"]

    def drawn(*sizes: int) -> torch.Tensor:
        made = torch.empty(sizes, device=device, dtype=torch.float32)
        return made.normal_(0, DEVIATION, generator=generator).half().cpu()

    def ones() -> torch.Tensor:
        return torch.ones(hidden, dtype=torch.float16)

    part: Tensors = {
        "model.embed_tokens.weight": drawn(config["vocab_size"], hidden),
        "model.norm.weight": ones(),
    }
    if not config["tie_word_embeddings"]:
        part["lm_head.weight"] = drawn(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        part[at + "input_layernorm.weight"] = ones()
        part[at + "post_attention_layernorm.weight"] = ones()
        for name, width in (("q", hidden), ("k", narrow), ("v", narrow)):
            part[f"{at}self_attn.{name}_proj.weight"] = drawn(width, hidden)
            part[f"{at}self_attn.{name}_proj.bias"] = drawn(width)
        part[at + "self_attn.o_proj.weight"] = drawn(hidden, hidden)
        part[at + "mlp.gate_proj.weight"] = drawn(inner, hidden)
        part[at + "mlp.up_proj.weight"] = drawn(inner, hidden)
        part[at + "mlp.down_proj.weight"] = drawn(hidden, inner)
        if (layer + 1) % LAYERS_PER_FILE == 0:
            yield part
            part = {}
    if part:
        yield part


def make(directory: Path, shape: str, tokenizer: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, directory)
    vocabulary = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    config = config_of(shape, vocabulary)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    placed: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(shards(config)):
        file = f"model-{number:05}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--tokenizer", type=Path, required=True)
    options = parser.parse_args()
    print(make(options.directory, options.shape, options.tokenizer))


if __name__ == "__main__":
    main()
