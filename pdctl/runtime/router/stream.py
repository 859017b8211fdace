"""Server-sent events of an engine, as bytes: complete ones only, never rewritten.

An event leaves the router with the bytes that it came with. One that is cut in the middle
never leaves, so that what follows it (our error event) can be read.
"""

from __future__ import annotations

import enum
import re
from typing import Any

import msgspec

MAX_EVENT_BYTES = 16 << 20

_END = re.compile(rb"\r?\n\r?\n")
_LONGEST_END = 4


class Kind(enum.Enum):
    COMMENT = "comment"
    """Keep-alive: no `data` in it."""
    EMPTY = "empty"
    """A chunk without any output (a role, or the usage at the end); a client's clock must not
    stop at it."""
    CONTENT = "content"
    ERROR = "error"
    DONE = "done"


class Event(msgspec.Struct, frozen=True):
    raw: bytes
    """With its blank line."""
    kind: Kind


class EventTooLong(Exception):
    pass


class Splitter:
    """Cuts a byte stream into events; linear in what it is fed."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0

    @property
    def partial(self) -> bool:
        """Whether an event has begun and not ended."""
        return bool(self._buffer.strip())

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that `chunk` completes.

        Raises:
            EventTooLong: one is over MAX_EVENT_BYTES.
        """
        self._buffer += chunk
        found: list[Event] = []
        start = 0
        search = max(0, self._searched - _LONGEST_END)
        while (end := _END.search(self._buffer, search)) is not None:
            raw = bytes(self._buffer[start : end.end()])
            found.append(Event(raw, kind_of(raw)))
            start = search = end.end()
        del self._buffer[:start]
        self._searched = len(self._buffer)
        if self._searched > MAX_EVENT_BYTES:
            raise EventTooLong
        return found


def kind_of(raw: bytes) -> Kind:
    """What an event is; anything that is not understood counts as content and passes."""
    payload = payload_of(raw)
    if payload is None:
        return Kind.COMMENT
    if payload == b"[DONE]":
        return Kind.DONE
    try:
        chunk = msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return Kind.CONTENT
    if not isinstance(chunk, dict):
        return Kind.CONTENT
    if chunk.get("error"):
        return Kind.ERROR
    choices = chunk.get("choices")
    if isinstance(choices, list) and not any(_says(c) for c in choices):
        return Kind.EMPTY
    return Kind.CONTENT


def payload_of(raw: bytes) -> bytes | None:
    """The event's data lines joined; None where it has none."""
    lines = [
        line.removeprefix(b"data:").removeprefix(b" ")
        for line in raw.splitlines()
        if line.startswith(b"data:")
    ]
    return b"\n".join(lines).strip() if lines else None


_OUTPUTS = ("content", "text", "reasoning", "reasoning_content", "tool_calls", "refusal")


def _says(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return True
    delta = choice.get("delta")
    said = delta if isinstance(delta, dict) else choice
    return choice.get("finish_reason") is not None or any(said.get(name) for name in _OUTPUTS)
