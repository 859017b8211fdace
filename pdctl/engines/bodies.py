"""What every engine's adapter does with a client's body and with an engine's answer. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from pdctl.errors import HANDOFF_CAUSES

MOST_QUOTED = 500
"""Characters of an answer that is no JSON error."""


def one_token(body: dict[str, Any], dropped: Collection[str]) -> dict[str, Any]:
    """P's copy (DESIGN §7): one token, not streamed, one choice, without the fields that say
    how more of them are to be chosen or shown."""
    kept = {name: value for name, value in body.items() if name not in dropped}
    return {**kept, "max_tokens": 1, "max_completion_tokens": 1, "stream": False, "n": 1}


def has_media(messages: Any) -> bool:
    """Whether a chat's messages hold images, sound or video; anything else that is no list of
    messages is the engine's own to refuse."""
    if not isinstance(messages, list):
        return False
    contents = (m.get("content") for m in messages if isinstance(m, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    kinds = [str(part.get("type")) for part in parts if isinstance(part, dict)]
    return any(medium in kind for kind in kinds for medium in ("image", "audio", "video"))


def error_of(status: int, body: bytes) -> tuple[str, str | None]:
    """An engine's error answer as (message, handoff cause or None): OpenAI's error object, one
    without the envelope, FastAPI's `detail`, or whatever text there is."""
    text = body.decode("utf-8", "replace").strip()
    try:
        parsed = json.loads(text)
        error = parsed.get("error", parsed)
    except (ValueError, AttributeError, RecursionError):
        return text[:MOST_QUOTED] or f"HTTP {status} without a body", None
    if isinstance(error, dict):
        cause = error.get("code")
        said = error.get("message") or error.get("detail") or text[:MOST_QUOTED]
        return str(said), cause if cause in HANDOFF_CAUSES else None
    return str(error), None
