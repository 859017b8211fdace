"""What must be known of this machine."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from pdctl.errors import HostError
from pdctl.runtime.hosts import trial
from pdctl.runtime.hosts.facts import host_facts
from pdctl.runtime.hosts.survey import (
    Binding,
    CheckpointRead,
    Dialled,
    HashProgress,
    HostFacts,
    Listener,
)
from pdctl.runtime.machine.listening import listeners
from pdctl.runtime.machine.ports import check_bindings, failed_bind
from pdctl.topology.checkpoint import Checkpoint, read_checkpoint
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.digests import DigestCache
from pdctl.topology.fingerprint import Fingerprint, fingerprint


class LocalSurvey:
    """A `Survey` without any connection in between.

    Args:
        name: the host's, for messages.
        cache: of digests; None: the user's own.
    """

    def __init__(self, name: str = "local", *, cache: DigestCache | None = None) -> None:
        self.name = name
        self.cache = cache
        self._answering: dict[tuple[str, int], trial.Answering] = {}
        self._lock = threading.Lock()

    def facts(self) -> HostFacts:
        try:
            return host_facts()
        except OSError as error:
            raise HostError(f'host "{self.name}": {error}') from error

    def checkpoint(self, model_dir: str) -> CheckpointRead:
        path = Path(model_dir).expanduser()
        checkpoint, problems = read_checkpoint(path)
        return CheckpointRead(
            model_dir=os.fspath(path),
            real_dir=os.path.realpath(path),
            checkpoint=checkpoint,
            problems=tuple(problems),
        )

    def fingerprint(
        self, model_dir: str, checkpoint: Checkpoint, progress: HashProgress
    ) -> Fingerprint:
        path = Path(model_dir).expanduser()
        return fingerprint(path, checkpoint, cache=self.cache, progress=progress)

    def listeners(self) -> list[Listener]:
        return listeners()

    def bindings(self, wanted: tuple[Binding, ...]) -> list[Diagnostic]:
        return check_bindings(wanted)

    def answer(
        self, address: tuple[str, int], token: str, *, for_s: float, encrypt: bool = False
    ) -> None:
        """A second one at the same address ends the first."""
        with self._lock:
            before = self._answering.pop(address, None)
            if before is not None:
                before.close()
            try:
                answering = trial.Answering(address, token, for_s, encrypt=encrypt)
                self._answering[address] = answering
            except OSError as error:
                raise HostError(f'host "{self.name}": {failed_bind(address, error)}') from error

    def dial(
        self,
        address: tuple[str, int],
        token: str,
        *,
        timeout_s: float,
        measure_bytes: int = 0,
        encrypt: bool = False,
    ) -> Dialled:
        return trial.dial(
            *(address, token),
            timeout_s=timeout_s,
            measure_bytes=measure_bytes,
            encrypt=encrypt,
        )

    def close(self) -> None:
        """Ends what still answers."""
        with self._lock:
            for one in self._answering.values():
                one.close()
            self._answering.clear()
