"""A real Llama checkpoint that always answers one text: each token's best successor is written
into its output layer, and attention adds nothing. For what only certain text shows, tool calls."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tiny import END, START, make_checkpoint
from tokenizers import AddedToken, Tokenizer

GAIN = 20.0

TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for tool_call in message.tool_calls or [] %}"
    "<tool_call>{{ tool_call.name }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Names the tools, and how calls are written, as Qwen's does."""


def make_scripted(directory: Path, pieces: tuple[str, ...]) -> Path:
    """A checkpoint that answers `pieces`, one token each, and then ends, to every prompt that
    ends with a line feed.

    Raises:
        ValueError: a piece comes twice: a token has one successor only.
    """
    if len(set(pieces)) != len(pieces):
        raise ValueError("a piece comes twice")
    make_checkpoint(directory, "llama")
    (directory / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text())
    config["vocab_size"] = tokenizer.get_vocab_size()
    (directory / "config.json").write_text(json.dumps(config))
    words = ("Ċ", *pieces, END)
    ids = [tokenizer.token_to_id(word) for word in words]
    weights = load_file(directory / "model.safetensors")
    save_file(
        _rewired(weights, config["vocab_size"], ids),
        directory / "model.safetensors",
        {"format": "pt"},
    )
    assert tokenizer.encode(f"{START}assistant\n").ids[-1] == ids[0]
    return directory


def _rewired(
    weights: dict[str, np.ndarray], vocabulary: int, ids: list[int]
) -> dict[str, np.ndarray]:
    embedding = weights["model.embed_tokens.weight"]
    random = np.random.default_rng(0)
    more = random.standard_normal((vocabulary - len(embedding), embedding.shape[1]))
    embedding = np.concatenate([embedding, (more * 0.2).astype(np.float16)])
    head = np.zeros(embedding.shape, np.float32)
    for source, target in pairwise(ids):
        direction = embedding[source].astype(np.float32)
        head[target] += GAIN * direction / float(direction @ direction) ** 0.5
    silent = {
        name: np.zeros_like(tensor)
        for name, tensor in weights.items()
        if name.endswith(("o_proj.weight", "down_proj.weight"))
    }
    return {
        **weights,
        **silent,
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head.astype(np.float16),
    }
