"""Where an answer goes."""

from __future__ import annotations

from typing import Protocol

from pdctl.runtime.router.policy import Path


class ClientGone(Exception):
    """The client closed its connection; nobody is left to tell anything."""


class Delivery(Protocol):
    """A client's response, or a canary's ledger.

    All of it is called from one task; `event` begins the stream. Any may raise ClientGone.
    """

    @property
    def begun(self) -> bool:
        """Whether the client has a status; no other try can follow."""
        ...

    def decided(self, text: str) -> None:
        """Why the request takes its path; comes before `route`, where anything was decided."""
        ...

    def route(self, path: Path, room: int | None, retried: Path | None) -> None:
        """The path of the try that begins, and of the one that failed before it."""
        ...

    def recomputed(self, path: Path) -> None:
        """The handoff failed and the decode replica computed the prompt itself."""
        ...

    def prefilled(self, body: bytes) -> None:
        """Prefill's own answer, which no client sees."""
        ...

    async def whole(self, body: bytes, content_type: str) -> None:
        """The one answer of a request that does not stream."""
        ...

    async def event(self, raw: bytes) -> None:
        """Bytes of one or more complete events, as the engine sent them."""
        ...

    async def end(self) -> None:
        """The stream is complete."""
        ...
