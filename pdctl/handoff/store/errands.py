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
        self._closed = False

    def run(self, errand: Callable[[], None]) -> None:
        """Returns at once. Not run where it was closed before."""
        self._work.put(errand)
        if len(self._threads) < self._count:
            self._hire()

    def close(self, timeout_s: float) -> None:
        """What was given before is still run, within that time."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._work.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _hire(self) -> None:
        with self._lock:
            if len(self._threads) < self._count and not self._closed:
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                thread.start()
                self._threads.append(thread)

    def _serve(self) -> None:
        while (errand := self._work.get()) is not None:
            try:
                errand()
            # an engine's callback may raise anything; the next errand is another's (R34)
            except Exception:
                log.exception("%s: an errand failed", self._name)
            # the next one may be long in coming, and what this one held would wait for it
            del errand
