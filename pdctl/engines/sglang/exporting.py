"""The thread that copies what prefill has computed out of SGLang's KV memory.

SGLang's scheduler hands over blocks once a chunk is computed, and may take them back only after
`PrefillLeg.abort` has returned; so the copy is cut into short parts, and an abort waits for the
one that is under way.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger("pdctl.engines.sglang")


class Exporter:
    """One thread for all requests: copies run in the order in which chunks were computed."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="pdctl-export", daemon=True).start()

    def put(self, job: Callable[[], None]) -> None:
        """Never blocks. A job handles its own errors."""
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            # one request's copy must not end the thread that all share (R34)
            except Exception:
                log.exception("an export failed")
