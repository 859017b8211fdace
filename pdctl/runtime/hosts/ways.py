"""The connections of one host that carry forwards: the main one, and what was laid beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pdctl.runtime.hosts.connection import Connection
from pdctl.runtime.hosts.ssh import Forward


class Ways:
    """Makes the main connection with all forwards; further ones get a connection beside it, so
    that nothing is cut which runs. Any thread.

    Args:
        start: starts one connection that carries these forwards.
    """

    def __init__(
        self,
        start: Callable[[tuple[Forward, ...]], Connection],
        forwards: tuple[Forward, ...] = (),
    ) -> None:
        self._start = start
        self._wanted = forwards
        self._laid: set[Forward] = set()
        self._main: Connection | None = None
        self._beside: list[Connection] = []
        self._lock = threading.Lock()

    def main(self) -> Connection:
        """A new main connection, which is not established yet. HostError where ssh can't run."""
        with self._lock:
            self._end_beside()
            self._main = self._start(self._wanted)
            self._laid = set(self._wanted)
            return self._main

    def lay(self, wanted: tuple[Forward, ...]) -> None:
        """From now on these. One that goes is there until the next main connection.

        Raises:
            HostError: one of them can't be laid; nothing has changed.
        """
        with self._lock:
            new = tuple(forward for forward in wanted if forward not in self._laid)
            main = self._main
            if new and main is not None and not main.ending:
                beside = self._start(new)
                beside.on_lost = lambda _: main.close()  # the next main connection has it all
                beside.establish()
                self._beside.append(beside)
                self._laid |= set(new)
            self._wanted = wanted

    def close(self) -> None:
        """Ends what lies beside the main connection; bounded."""
        with self._lock:
            self._end_beside()

    def _end_beside(self) -> None:
        for connection in self._beside:
            connection.close()
        self._beside.clear()
