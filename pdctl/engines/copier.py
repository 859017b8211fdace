"""A thread that copies between an engine's KV memory and pages, beside the engine's own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger("pdctl.engines")

CLOSE_S = 5.0


class Copier:
    """One thread for all requests: jobs run in the order in which they were given."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], object]) -> None:
        """Never blocks. A job handles its own errors."""
        self._jobs.put(job)

    def close(self) -> None:
        """What was given is done first; bounded."""
        self._jobs.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            # one request's copy must not end the thread that all share (R34)
            except Exception:
                log.exception("a copy failed")
            # its loan's memory goes with it, not with the next one
            del job
