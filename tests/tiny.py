"""Tiny random checkpoints that MLX serves, made with numpy, safetensors and tokenizers alone.

Four layers, hidden size 256, four heads, two KV heads, head dim 64. Deviations are such that
KV matters (zeroed, it moves logits by 13) while its rounding to 16 bits does not (at most 0.008
in logits whose deviation is 3.3), and `SEEDS` such that no two best tokens lie nearer than that
on the end-to-end tests' prompts. A digit is always one token, so a prompt's length can be chosen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FAMILIES = ("llama", "qwen2", "qwen3")
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 4, 256, 4, 2, 64, 512
DEVIATION, PROJECTION_DEVIATION = 0.2, 0.07
ROPE_THETA = 100000.0
MAX_POSITIONS = 8192
SEEDS = {"llama": 198, "qwen2": 52, "qwen3": 55}
START, END = "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_checkpoint(
    directory: Path, family: str, *, seed: int | None = None, shards: int = 1, **config: Any
) -> Path:
    """Writes one checkpoint; keywords change or (None) drop fields of config.json.

    `seed` None is the family's own of `SEEDS`, whose greedy text has no near-ties on the
    prompts of the end-to-end tests.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": START,
            "eos_token": END,
            "pad_token": END,
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
        },
    )
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    fields = {**_config(family, tokenizer.get_vocab_size()), **config}
    _write_json(directory / "config.json", {k: v for k, v in fields.items() if v is not None})
    drawn = SEEDS[family] if seed is None else seed
    _write_weights(directory, dict(_tensors(family, tokenizer.get_vocab_size(), drawn)), shards)
    return directory


def make_tokenizer() -> Tokenizer:
    """BPE over printable ASCII: pairs of letters, and a space before a letter, are one token."""
    alphabet = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    merges = [
        *product(ascii_lowercase, repeat=2),
        *product(ascii_uppercase, "aeiou"),
        *product("Ġ", ascii_lowercase),
    ]
    words = [*alphabet, *("".join(pair) for pair in merges)]
    vocabulary = {word: index + 3 for index, word in enumerate(words)}
    special = {"<|endoftext|>": 0, START: 1, END: 2}
    made = Tokenizer(models.BPE(vocab={**special, **vocabulary}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True) for word in special])
    return made


def digits(count: int, seed: int = 0) -> str:
    """Text of exactly `count` tokens."""
    drawn = np.random.default_rng([count, seed]).integers(0, 10, count)
    return "".join(map(str, drawn))


def chat_overhead_tokens() -> int:
    """Tokens that the template adds around one user message."""
    text = f"{START}user\n{END}\n{START}assistant\n"
    return len(make_tokenizer().encode(text).ids)


def _config(family: str, vocabulary: int) -> dict[str, Any]:
    architecture = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    fields = {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": family,
        "torch_dtype": "float16",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {**fields, "head_dim": HEAD_DIM} if family == "qwen3" else fields


def _tensors(family: str, vocabulary: int, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    random = np.random.default_rng(seed)

    def normal(*shape: int, deviation: float = PROJECTION_DEVIATION) -> np.ndarray:
        return (random.standard_normal(shape) * deviation).astype(np.float16)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, np.float16)

    yield "model.embed_tokens.weight", normal(vocabulary, HIDDEN, deviation=DEVIATION)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{at}.self_attn.{name}_proj.weight", normal(heads * HEAD_DIM, HIDDEN)
            if family == "qwen2":
                yield f"{at}.self_attn.{name}_proj.bias", normal(heads * HEAD_DIM)
        yield f"{at}.self_attn.o_proj.weight", normal(HIDDEN, HEADS * HEAD_DIM)
        if family == "qwen3":
            yield f"{at}.self_attn.q_norm.weight", ones(HEAD_DIM)
            yield f"{at}.self_attn.k_norm.weight", ones(HEAD_DIM)
        yield f"{at}.mlp.gate_proj.weight", normal(INTERMEDIATE, HIDDEN)
        yield f"{at}.mlp.up_proj.weight", normal(INTERMEDIATE, HIDDEN)
        yield f"{at}.mlp.down_proj.weight", normal(HIDDEN, INTERMEDIATE)
        yield f"{at}.input_layernorm.weight", ones(HIDDEN)
        yield f"{at}.post_attention_layernorm.weight", ones(HIDDEN)
    yield "model.norm.weight", ones(HIDDEN)
    yield "lm_head.weight", normal(vocabulary, HIDDEN, deviation=DEVIATION)


def _write_weights(directory: Path, tensors: dict[str, np.ndarray], shards: int) -> None:
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata)
        return
    names = list(tensors)
    placed: dict[str, str] = {}
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[index::shards]}
        save_file(part, directory / file, metadata)
        placed |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": placed},
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True))
