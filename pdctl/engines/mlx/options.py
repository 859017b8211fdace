"""mlx_lm.server's own options: which ones a topology may set, and what each accepts.

The names are the library's, read from `mlx_lm.server.main` of 0.31.3 and 0.32.2; both know
every one of `PASSED`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from pdctl.engines.engine_config import Problem, check_config, option_words
from pdctl.topology.diagnostics import Diagnostic

PREFILL_STEP_TOKENS = 256
"""Default `prefill_step_size`: four pages, so that every chunk but the last fills its pages.

All other streams of a replica wait for one chunk's forward, so the step bounds their longest
pause; the library's own 2048 would be eight times that. The same default in every role: a
prompt cut elsewhere takes other kernels, and near-ties of greedy decoding may flip.
"""

PROMPT_CONCURRENCY = 1
"""Default `prompt_concurrency`: one prompt's chunk per step.

The library would run eight chunks between two decode steps, padded to the longest of them.
"""


class Option(msgspec.Struct, frozen=True):
    """One option: the Python types of its TOML value, and its least value."""

    types: tuple[type, ...]
    minimum: float | None = None


PASSED: Mapping[str, Option] = {
    "prefill_step_size": Option((int,), 1),
    "prompt_concurrency": Option((int,), 1),
    "decode_concurrency": Option((int,), 1),
    "prompt_cache_size": Option((int,), 1),
    "prompt_cache_bytes": Option((int, str), 0),
    "max_tokens": Option((int,), 1),
    "temp": Option((int, float), 0),
    "top_p": Option((int, float), 0),
    "top_k": Option((int,), 0),
    "min_p": Option((int, float), 0),
    "chat_template_args": Option((dict,)),
    "allowed_origins": Option((str,)),
    "log_level": Option((str,)),
}

DEFAULTS: Mapping[str, Any] = {
    "prefill_step_size": PREFILL_STEP_TOKENS,
    "prompt_concurrency": PROMPT_CONCURRENCY,
}

OWNED: Mapping[str, str] = {
    "model": "set `model` on the replica",
    "host": "the engine listens on loopback; the router is what others reach",
    "port": "set `http_port` on the replica",
    "role": "set `role` on the replica",
    "dtype": "set `dtype` in [model], or `compute_dtype` on the replica",
    "compute_dtype": "set `compute_dtype` on the replica",
    "page_size": "pages are 64 tokens on every replica",
    "chat_template": "the checkpoint's own template is part of the contract",
    "use_default_chat_template": "the checkpoint's own template is part of the contract",
    "adapter_path": "adapters are not served in this version",
    "draft_model": "speculative decoding is not served in this version",
    "num_draft_tokens": "speculative decoding is not served in this version",
    "pipeline": "one replica runs on one device in this version",
    "kv_bits": "a quantised KV cache is not served in this version",
    "kv_group_size": "a quantised KV cache is not served in this version",
    "quantized_kv_start": "a quantised KV cache is not served in this version",
    "trust_remote_code": "code from a checkpoint is never run",
}
"""Options that pdctl sets itself or refuses, and what to do instead."""


def check_options(config: Mapping[str, Any], replica: str) -> list[Diagnostic]:
    """Every entry of an `engine_config` that cannot be passed on, in the file's order."""
    return check_config(config, replica, _problem)


def _problem(name: str, value: Any) -> Problem | None:
    if name in OWNED:
        return Problem("owned", "is not for engine_config", OWNED[name])
    option = PASSED.get(name)
    if option is None:
        near = get_close_matches(name, PASSED, n=1)
        return Problem(
            "unknown",
            "is not an option of mlx_lm.server",
            f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(PASSED))}",
        )
    if isinstance(value, bool) or not isinstance(value, option.types):
        names = " or ".join(t.__name__ for t in option.types)
        return Problem("value", f"must be of type {names}", None)
    least = option.minimum
    if least is not None and isinstance(value, int | float) and value < least:
        return Problem("value", f"must be at least {least:g}", None)
    return None


def option_arguments(config: Mapping[str, Any]) -> list[str]:
    """The command-line form of an `engine_config`, defaults included, sorted by name."""
    return option_words(config, DEFAULTS, _words)


def _words(flag: str, value: Any) -> list[str]:
    text = json.dumps(value, sort_keys=True) if isinstance(value, dict) else str(value)
    return [f"--{flag}", text]
