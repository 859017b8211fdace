"""Threads of a client's own, for what its engine must not wait for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger("pdctl.store")


class Errands:
    """Runs what it is given, in order of arrival, on a few daemon threads that start with the
    first errand."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._name = name
        self._count = threads
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def run(self, errand: Callable[[], None]) -> None:
        """Returns at once."""
        self._work.put(errand)
        if len(self._threads) < self._count:
            self._hire()

    def close(self, timeout_s: float) -> None:
        """What was given before is still run, within that time."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _hire(self) -> None:
        with self._lock:
            if len(self._threads) < self._count:
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self) -> None:
        while (errand := self._work.get()) is not None:
            try:
                errand()
            # an engine's callback may raise anything; the next errand is another's (R34)
            except Exception:
                log.exception("%s: an errand failed", self._name)
