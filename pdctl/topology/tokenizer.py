"""What decides token ids, and how a chat becomes text: fingerprints of a checkpoint's files.

JSON counts by meaning (key order, spacing and escapes don't), everything else by its bytes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from pdctl.topology.checkpoint import read_json

BY_MEANING = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
BY_BYTES = (
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "qwen.tiktoken",
    "tekken.json",
)

COSMETIC_KEYS = frozenset(
    {
        "_name_or_path",
        "auto_map",
        "backend",
        "chat_template",
        "clean_up_tokenization_spaces",
        "is_local",
        "local_files_only",
        "max_length",
        "model_max_length",
        "name_or_path",
        "padding_side",
        "processor_class",
        "stride",
        "tokenizer_file",
        "transformers_version",
        "truncation_side",
        "truncation_strategy",
    }
)
"""Of tokenizer_config.json: none changes a token id. chat_template is a field of its own."""

NO_TEMPLATE = "none"


def tokenizer_digests(model_dir: Path) -> dict[str, str]:
    """File name → SHA-256 (hex) of what it says, for every file that changes token ids.

    Raises:
        ValueError: a file can't be read or is garbled; the text names it.
    """
    found = {}
    for name in BY_MEANING:
        try:
            parsed = read_json(model_dir / name)
        except FileNotFoundError:
            continue
        if name == "tokenizer_config.json":
            parsed = {k: v for k, v in parsed.items() if k not in COSMETIC_KEYS and v is not None}
        found[name] = _digest(parsed)
    for name in BY_BYTES:
        try:
            found[name] = hashlib.sha256((model_dir / name).read_bytes()).hexdigest()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ValueError(f"{model_dir / name} can't be read: {error.strerror}") from None
    return found


def combine(digests: dict[str, str]) -> str:
    """One digest over named ones, whatever their order."""
    return _digest(digests)


def chat_templates(model_dir: Path) -> tuple[dict[str, str], str]:
    """(name → template, the file that holds them), wherever they are stored.

    A template file wins over tokenizer_config.json's key, as in transformers. One newline at a
    template's end does not count: Jinja drops it.

    Raises:
        ValueError: a file can't be read or is garbled; the text names it.
    """
    path = model_dir / "chat_template.jinja"
    try:
        if path.is_file():
            found = {"default": path.read_text("utf-8")}
            for extra in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
                found[extra.stem] = extra.read_text("utf-8")
            return _trimmed(found), path.name
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read: {error}") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        try:
            stored = read_json(model_dir / name).get("chat_template")
        except FileNotFoundError:
            continue
        if stored:
            return _trimmed(_named(stored, model_dir / name)), name
    return {}, "chat_template.jinja"


def template_digest(templates: dict[str, str]) -> str:
    return _digest(templates) if templates else NO_TEMPLATE


def _named(stored: object, path: Path) -> dict[str, str]:
    if isinstance(stored, str):
        return {"default": stored}
    if isinstance(stored, dict) and all(isinstance(v, str) for v in stored.values()):
        return dict(stored)
    try:
        if isinstance(stored, list):
            return {str(item["name"]): str(item["template"]) for item in stored}
    except (KeyError, TypeError):
        pass
    raise ValueError(f"{path} has a garbled chat_template")


def _trimmed(templates: dict[str, str]) -> dict[str, str]:
    return {name: text.replace("\r\n", "\n").removesuffix("\n") for name, text in templates.items()}


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()
