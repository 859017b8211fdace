"""What vLLM has and computes, as its scheduler sees it. No I/O, no engine.

Objects of vLLM are duck-typed: the names are those of 0.28.0 to 0.32.0.
"""

from __future__ import annotations

from typing import Any

from pdctl.engines.vllm.steps import Load


class LoadCount:
    """All methods are called by the scheduler's thread; `finished` may come twice."""

    def __init__(self) -> None:
        self._active: set[str] = set()
        self._rooms: dict[str, int] = {}
        self._prompt_tokens = self._output_tokens = 0
        self._over: list[int] = []

    def arrived(self, request: Any) -> None:
        self._active.add(request.request_id)
        self._prompt_tokens += request.num_prompt_tokens

    def follow(self, request_id: str, room: int) -> None:
        """From now on each step that computes for this request is told of by its room."""
        self._rooms[request_id] = room

    def finished(self, request: Any) -> None:
        if request.request_id in self._active:
            self._active.discard(request.request_id)
            self._output_tokens += len(request.output_token_ids)
        room = self._rooms.pop(request.request_id, None)
        if room is not None:
            self._over.append(room)

    def take(self, scheduled: Any) -> Load:
        """Of the step that was just scheduled, and since the one before."""
        computing = (self._rooms.get(name) for name in scheduled.num_scheduled_tokens)
        load = Load(
            requests_active=len(self._active),
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            decoding=[room for room in computing if room is not None],
            decoded=self._over,
        )
        self._prompt_tokens = self._output_tokens = 0
        self._over = []
        return load
