"""The seam under the data plane: ordered byte streams between two replicas.

One implementation per file. Foreign exceptions end here: everything raises PeerLost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Connection(Protocol):
    """A stream. One thread may read while another writes."""

    peer: str
    """For messages: "host:port"."""

    def send(self, parts: Sequence[memoryview]) -> int:
        """Sends a first part of the joined buffers; blocks until at least one byte is taken.

        Returns how many bytes were taken. Raises PeerLost, also after `unblock`.
        """
        ...

    def send_now(self, frame: bytes) -> bool:
        """Sends all of a small frame or nothing, without blocking; False where it could not.

        A frame that could be sent only in part ends the connection. Raises PeerLost.
        """
        ...

    def recv_into(self, view: memoryview) -> int:
        """Blocks for at least one byte; 0 at the end of the stream or after `unblock`.

        Raises PeerLost.
        """
        ...

    def quiet(self) -> bool:
        """True while the stream is open and holds nothing unread. Does not block."""
        ...

    def unblock(self) -> None:
        """Ends the stream in both directions and wakes whoever is in send or recv_into; what
        was sent before still arrives. Any thread, any number of times, never raises."""
        ...

    def close(self) -> None:
        """Frees it; only when no thread is inside any other call. Never raises."""
        ...


class Listener(Protocol):
    port: int

    def accept(self) -> Connection | None:
        """Blocks for the next connection; None after `close`. Raises PeerLost, after which it
        may be called again."""
        ...

    def close(self) -> None:
        """Wakes `accept` and frees the port. Any thread, any number of times."""
        ...


class Transport(Protocol):
    def listen(self, address: tuple[str, int]) -> Listener:
        """Port 0 picks one. Raises PeerLost where it can't listen there."""
        ...

    def dial(self, address: tuple[str, int], timeout_s: float) -> Connection:
        """Raises PeerLost where nobody answers in time."""
        ...
