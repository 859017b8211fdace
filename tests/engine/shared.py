"""Ordinary replicas of one model that share their prefixes through a page store, and what is
asked of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from engine.vllm_pairs import COMPLETIONS, MODEL_NAME, OUTPUT_TOKENS
from engines.replicas import WAIT_S, Process, text_of
from tiny import digits

from pdctl.handoff.page import PageGeometry
from pdctl.handoff.store.local import LocalServer
from pdctl.handoff.store.shelves import Shelves
from pdctl.topology.contract import Contract
from pdctl.topology.model import PAGE_TOKENS, Engine

DOCUMENT_TOKENS = 700
STORE_PAGES = 150
"""Fewer than a module's documents take."""


class Store:
    """A host's page store, in the test's process; can end and come back empty."""

    def __init__(self, path: Path, contract: Contract, pages: int = STORE_PAGES) -> None:
        self.path = str(path)
        self._contract = contract
        self._pages = pages
        self.open()

    def open(self) -> None:
        geometry = PageGeometry.of(self._contract)
        self.shelves = Shelves(self._pages * geometry.page_bytes, geometry)
        self._server = LocalServer(self.path, self.shelves, self._contract.digest)
        self._server.start()

    def close(self) -> None:
        self._server.close()
        self.shelves.close()

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, self.shelves.counts()
            time.sleep(0.005)

    def at_rest(self) -> None:
        """No page is on loan."""
        self.until(lambda: self.shelves.counts().loans == 0)


class Answer(NamedTuple):
    whole: dict[str, Any]
    seconds: float

    @property
    def text(self) -> str:
        return text_of(self.whole)

    @property
    def prompt_tokens(self) -> int:
        return int(self.whole["usage"]["prompt_tokens"])

    @property
    def cached_tokens(self) -> int:
        told = self.whole["usage"].get("prompt_tokens_details") or {}
        return int(told.get("cached_tokens") or 0)

    @property
    def is_cold(self) -> bool:
        """No page of the prompt was reused. MLX's own cache has no pages: two documents that
        begin with the same digits share these."""
        return self.cached_tokens < PAGE_TOKENS


def question(document: str, asked: str = "", **fields: Any) -> dict[str, Any]:
    """Each character is a token; each engine hides special tokens as it likes."""
    return {
        "model": MODEL_NAME,
        "prompt": document + asked,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "skip_special_tokens": False,
        **fields,
    }


def ask(process: Process, body: dict[str, Any]) -> Answer:
    began = time.monotonic()
    status, whole = process.post(COMPLETIONS, body)
    assert status == 200, whole
    return Answer(whole, time.monotonic() - began)


def document(seed: int, tokens: int = DOCUMENT_TOKENS) -> str:
    return digits(tokens, seed)


def reusable(process: Process, held: int, tokens: int) -> int:
    """Of a prompt of which the store has `held` positions: how many need not be computed."""
    most = min(held, tokens - 1)
    if process.spec.engine is Engine.SGLANG:
        return most // PAGE_TOKENS * PAGE_TOKENS
    return most
