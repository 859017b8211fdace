"""Server-sent events, as far as completion streams use them. No I/O."""

from __future__ import annotations

DONE = "[DONE]"


class Events:
    """Turns pieces of a byte stream into the payloads of its complete events.

    Comments and fields other than `data` are dropped, several `data` lines are joined with a
    newline, LF and CRLF both end a line. Pieces may split anywhere, also inside a character.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        complete: list[str] = []
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for raw in lines:
            line = raw.removesuffix(b"\r").decode(errors="replace")
            if not line:
                if self._lines:
                    complete.append("\n".join(self._lines))
                    self._lines = []
            elif line.startswith("data:"):
                self._lines.append(line[5:].removeprefix(" "))
        return complete
