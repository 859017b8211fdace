"""vLLM's place in its cluster: its worker's process owns the KV memory, and attaches."""

from __future__ import annotations

from collections.abc import Mapping

from pdctl.engines import session
from pdctl.engines.session import Loaded
from pdctl.engines.vllm.steps import Load
from pdctl.topology.model import Engine

__all__ = ["Loaded", "Session"]

SERVED_PATH = "/version"
"""Answered by vLLM's HTTP server, which listens once its engine is up."""


class Session(session.Session):
    def __init__(self, environment: Mapping[str, str], http_port: int) -> None:
        super().__init__(environment, http_port, engine=Engine.VLLM, served_path=SERVED_PATH)

    def count(self, load: Load) -> None:
        self.board.gauge(requests_active=load.requests_active)
        if load.prompt_tokens or load.output_tokens:
            self.board.add(prompt_tokens=load.prompt_tokens, output_tokens=load.output_tokens)
        for room in load.decoding:
            self.board.decoded(room)
        for room in load.decoded:
            self.board.decode_over(room)
