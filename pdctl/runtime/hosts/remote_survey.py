"""What must be known of another machine: every question is one call to its far end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdctl.runtime.hosts.connection import Connection
from pdctl.runtime.hosts.survey import (
    Binding,
    CheckpointRead,
    Dialled,
    HashProgress,
    HostFacts,
    Listener,
)
from pdctl.topology.checkpoint import Checkpoint
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.fingerprint import Fingerprint

PATIENCE_S = 30.0
"""For what takes no time there."""
FACTS_S = 60.0
HASHING_S = 120.0
"""Between two signs of progress."""


class RemoteSurvey:
    """The `Survey` of a remote host.

    Args:
        connect: the connection of the moment; HostError where there is none.
    """

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect

    def facts(self) -> HostFacts:
        found: HostFacts = self._call("facts", patience_s=FACTS_S)
        return found

    def checkpoint(self, model_dir: str) -> CheckpointRead:
        found: CheckpointRead = self._call("checkpoint", model_dir)
        return found

    def fingerprint(
        self, model_dir: str, checkpoint: Checkpoint, progress: HashProgress
    ) -> Fingerprint:
        found: Fingerprint = self._call(
            "fingerprint", model_dir, checkpoint, patience_s=HASHING_S, progress=progress
        )
        return found

    def listeners(self) -> list[Listener]:
        found: list[Listener] = self._call("listeners")
        return found

    def bindings(self, wanted: tuple[Binding, ...]) -> list[Diagnostic]:
        found: list[Diagnostic] = self._call("bindings", wanted)
        return found

    def answer(
        self, address: tuple[str, int], token: str, *, for_s: float, encrypt: bool = False
    ) -> None:
        self._call("answer", address, token, for_s, encrypt)

    def dial(
        self,
        address: tuple[str, int],
        token: str,
        *,
        timeout_s: float,
        measure_bytes: int = 0,
        encrypt: bool = False,
    ) -> Dialled:
        asked = (address, token, timeout_s, measure_bytes, encrypt)
        found: Dialled = self._call("dial", *asked, patience_s=timeout_s + PATIENCE_S)
        return found

    def _call(
        self,
        operation: str,
        *arguments: object,
        patience_s: float = PATIENCE_S,
        progress: HashProgress | None = None,
    ) -> Any:
        return self._connect().call(
            f"survey.{operation}", *arguments, patience_s=patience_s, progress=progress
        )
