"""What a pair can't honour because its decode engine takes the first token from prefill. Pure."""

from __future__ import annotations

from typing import Any, Protocol


class Constrains(Protocol):
    """The part of an engine's spec that is read here."""

    recomputes_last_token: bool
    constraints: frozenset[str]


def unhonoured(
    body: dict[str, Any], prefill: Constrains, decode: Constrains
) -> list[tuple[str, str]]:
    """(parameter, reason): constraints that the decode engine puts on every token and the
    prefill engine not on the one that it samples."""
    if decode.recomputes_last_token:
        return []
    reason = "the first token comes from the prefill replica, whose engine does not apply it"
    missing = sorted(decode.constraints - prefill.constraints)
    return [(name, reason) for name in missing if _constrains(name, body.get(name))]


def _constrains(name: str, value: Any) -> bool:
    if name == "response_format":
        return isinstance(value, dict) and value.get("type") not in (None, "text")
    if name == "tool_choice":
        return value not in (None, "auto", "none")
    return bool(value)
