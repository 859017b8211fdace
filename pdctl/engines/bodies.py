"""What every engine's adapter does with a client's body. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def one_token(body: dict[str, Any], dropped: Collection[str]) -> dict[str, Any]:
    """P's copy (DESIGN §7): one token, not streamed, one choice, without the fields that say
    how more of them are to be chosen or shown."""
    kept = {name: value for name, value in body.items() if name not in dropped}
    return {**kept, "max_tokens": 1, "max_completion_tokens": 1, "stream": False, "n": 1}
