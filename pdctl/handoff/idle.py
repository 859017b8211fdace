"""Connections to senders that wait for their next handoff (R38)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pdctl.handoff.link import Link

IDLE_S = 45.0
"""Sooner than the sender closes its end, so that the two rarely cross."""
MAX_PER_SENDER = 16

Address = tuple[str, int]


class IdleLinks:
    """Thread-safe; the newest is taken first, so that surplus ones age."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: dict[Address, list[tuple[float, Link]]] = {}
        self._closed = False

    def take(self, address: Address) -> Link | None:
        """An open connection, or None. One that the sender has closed is dropped."""
        while True:
            with self._lock:
                links = self._idle.get(address)
                if not links:
                    return None
                _, link = links.pop()
            if link.connection.quiet():
                return link
            _drop(link)

    def put(self, address: Address, link: Link) -> None:
        with self._lock:
            links = self._idle.setdefault(address, [])
            if not self._closed and len(links) < MAX_PER_SENDER:
                links.append((self._clock(), link))
                return
        _drop(link)

    def expire(self, now: float) -> bool:
        """Closes what has been idle for too long; True while any is left."""
        old: list[Link] = []
        with self._lock:
            for address, links in list(self._idle.items()):
                old += [link for since, link in links if now - since >= IDLE_S]
                self._idle[address] = [each for each in links if now - each[0] < IDLE_S]
                if not self._idle[address]:
                    del self._idle[address]
            left = bool(self._idle)
        for link in old:
            _drop(link)
        return left

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links = [link for each in self._idle.values() for _, link in each]
            self._idle.clear()
        for link in links:
            _drop(link)


def _drop(link: Link) -> None:
    link.connection.unblock()
    link.connection.close()
