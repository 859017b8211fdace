"""Streams inside one process, with the faults that real links have. For tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pdctl.errors import PeerLost

CAPACITY_BYTES = 1 << 18
"""Of one direction; a sender blocks on more, as on a full socket buffer."""


class Pipe:
    """One direction. All of its conditions share the transport's lock.

    `stop_after` counts bytes from the beginning: a test picks any byte of a handoff as the
    last one that arrives.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._held = bytearray()
        self._taken = 0
        self._limit: int | None = None
        self._on_limit: Callable[[], None] = lambda: None
        self.ended = False
        """The writing end is gone: what was written before still arrives."""
        self.abandoned = False
        """The reading end is gone."""
        self.frozen = False

    @property
    def taken(self) -> int:
        """Bytes that the reader has got so far."""
        return self._taken

    @property
    def unread(self) -> int:
        return len(self._held)

    def stop_after(self, size: int, then: Callable[[], None]) -> None:
        """No byte past the first `size` arrives; `then` is called when they have."""
        self._limit, self._on_limit = size, then

    def put(self, parts: Sequence[memoryview], *, block: bool) -> int:
        with self._changed:
            while not self._closed_to_writer() and len(self._held) >= CAPACITY_BYTES:
                if not block:
                    return 0
                self._changed.wait()
            if self._closed_to_writer():
                raise PeerLost("the memory link was closed")
            room, sent = CAPACITY_BYTES - len(self._held), 0
            for part in parts:
                piece = part.cast("B")[: room - sent]
                self._held += piece
                sent += len(piece)
            self._changed.notify_all()
            return sent

    def get(self, view: memoryview) -> int:
        with self._changed:
            while not (self._readable() or self.abandoned or (self.ended and not self.frozen)):
                self._changed.wait()
            count = 0 if self.abandoned else min(self._readable(), view.nbytes)
            view.cast("B")[:count] = self._held[:count]
            del self._held[:count]
            self._taken += count
            self._changed.notify_all()
            reached = count > 0 and self._taken == self._limit
        if reached:
            self._on_limit()
        return count

    def _closed_to_writer(self) -> bool:
        return self.ended or (self.abandoned and not self.frozen)

    def quiet(self) -> bool:
        with self._changed:
            return not (self._held or self.ended or self.abandoned)

    def _readable(self) -> int:
        if self.frozen:
            return 0
        if self._limit is None:
            return len(self._held)
        return min(len(self._held), self._limit - self._taken)


class MemoryLink:
    """Both directions of one connection, and its faults. `up` runs from the dialling end."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.up, self.down = Pipe(self.changed), Pipe(self.changed)

    def freeze(self) -> None:
        """Nothing arrives any more, not even an end of the stream."""
        with self.changed:
            self.up.frozen = self.down.frozen = True

    def drained(self, timeout_s: float) -> bool:
        """Waits until whatever was sent has been received; False where it was not in time."""
        with self.changed:
            return self.changed.wait_for(
                lambda: self.up.unread == 0 and self.down.unread == 0, timeout_s
            )

    def cut(self) -> None:
        """Both ends see the end of the stream."""
        with self.changed:
            self.up.ended = self.down.ended = True
            self.changed.notify_all()


class MemoryConnection:
    def __init__(self, link: MemoryLink, reads: Pipe, writes: Pipe, peer: str) -> None:
        self.peer = peer
        self._link = link
        self._reads = reads
        self._writes = writes

    def send(self, parts: Sequence[memoryview]) -> int:
        return self._writes.put(parts, block=True)

    def send_now(self, frame: bytes) -> bool:
        with self._link.changed:
            sent = self._writes.put([memoryview(frame)], block=False)
        if sent and sent < len(frame):
            self.unblock()
            raise PeerLost("the memory link is stuck")
        return sent > 0

    def recv_into(self, view: memoryview) -> int:
        return self._reads.get(view)

    def quiet(self) -> bool:
        return self._reads.quiet()

    def unblock(self) -> None:
        with self._link.changed:
            self._writes.ended = True
            self._reads.abandoned = True
            self._link.changed.notify_all()

    def close(self) -> None:
        self.unblock()


class MemoryListener:
    def __init__(self, port: int, forget: Callable[[], None]) -> None:
        self.port = port
        self._forget = forget
        self._changed = threading.Condition()
        self._waiting: list[MemoryConnection] = []
        self._closed = False

    def accept(self) -> MemoryConnection | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return None if self._closed else self._waiting.pop(0)

    def offer(self, connection: MemoryConnection) -> None:
        with self._changed:
            self._waiting.append(connection)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._forget()


class MemoryTransport:
    """Addresses are ports only.

    Args:
        arm: called with every new link before either end uses it: the place to set faults.
    """

    def __init__(self, arm: Callable[[MemoryLink], None] = lambda link: None) -> None:
        self._arm = arm
        self._listeners: dict[int, MemoryListener] = {}
        self._next_port = 1
        self.links: list[MemoryLink] = []

    def listen(self, address: tuple[str, int]) -> MemoryListener:
        port = address[1] or self._next_port
        self._next_port = max(self._next_port, port) + 1
        if port in self._listeners:
            raise PeerLost(f"port {port} is taken")
        listener = MemoryListener(port, lambda: self._forget(port))
        self._listeners[port] = listener
        return listener

    def dial(self, address: tuple[str, int], timeout_s: float) -> MemoryConnection:
        listener = self._listeners.get(address[1])
        if listener is None:
            raise PeerLost(f"can't reach port {address[1]}: nobody listens")
        link = MemoryLink()
        self.links.append(link)
        self._arm(link)
        listener.offer(MemoryConnection(link, link.up, link.down, f"memory:{len(self.links)}"))
        return MemoryConnection(link, link.down, link.up, f"memory:{address[1]}")

    def _forget(self, port: int) -> None:
        self._listeners.pop(port, None)
