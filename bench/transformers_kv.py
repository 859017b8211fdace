"""KV that transformers computes in float32, for `fidelity.py`.

    python bench/transformers_kv.py MODEL_DIR PROMPTS.json OUT.npz

Runs in an environment that has torch and transformers. PROMPTS is a list of lists of token
ids; OUT gets, for prompt i, `kv{i}` float32 `[layers, 2, tokens, kv_heads, head_dim]` (K after
RoPE) and `first{i}`, the likeliest next token. Prints the versions that computed it, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM


def computed(model: Any, token_ids: list[int]) -> tuple[np.ndarray, int]:
    """One forward over the whole prompt, with plain attention."""
    with torch.inference_mode():
        answer = model(torch.tensor([token_ids]), use_cache=True)
    layers = [torch.stack([each.keys[0], each.values[0]]) for each in answer.past_key_values.layers]
    kv = torch.stack(layers).permute(0, 1, 3, 2, 4).contiguous()
    return kv.numpy(), int(answer.logits[0, -1].argmax())


def main() -> None:
    model_dir, prompts, out = sys.argv[1:4]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    arrays: dict[str, Any] = {}
    for at, token_ids in enumerate(json.loads(Path(prompts).read_text())):
        arrays[f"kv{at}"], arrays[f"first{at}"] = computed(model, token_ids)
    np.savez(out, **arrays)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    sys.stdout.write(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main()
