"""Pieces of pages over one connection without a handoff around them: as they are, with checksums,
with pdctl's frames.

One process sends them from where they lie in a prompt's pages; the other receives each into the
next of a few buffers. Both are told which pieces they are.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from pdctl.handoff.apart.receives import PIECES
from pdctl.handoff.arena import Bytes
from pdctl.handoff.link import PART_BYTES, Link
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.schedule import PIECE_BYTES
from pdctl.handoff.transport.sockets import SocketOptions
from pdctl.handoff.transport.tcp import TcpConnection

COPIES = ("plain", "hashed", "framed")
DIGEST_BYTES = 8
ROOM = 1


class Spot(NamedTuple):
    """A piece: these layers of that page."""

    page: int
    first_layer: int
    layers: int

    def bytes(self, geometry: PageGeometry) -> tuple[int, int]:
        """Where it begins in the pages, and its size."""
        start = self.page * geometry.page_bytes + self.first_layer * geometry.layer_bytes
        return start, self.layers * geometry.layer_bytes


class Copies:
    """One end of such a connection, which it owns. The thread that calls does all the work."""

    def __init__(self, connected: socket.socket, geometry: PageGeometry) -> None:
        self._geometry = geometry
        self._socket = connected
        connection = TcpConnection.over(connected, "the other end", SocketOptions())
        self._link = Link(
            connection, geometry, time.monotonic, lambda size: np.empty(size, np.uint8), PIECES
        )
        buffer_bytes = max(PIECE_BYTES, geometry.layer_bytes)
        self._buffers = [memoryview(bytearray(buffer_bytes)) for _ in range(PIECES)]

    def close(self) -> None:
        self._socket.close()

    def send(self, copy: str, spots: Sequence[Spot], pages: Bytes) -> None:
        """Returns once the other end has taken all of them.

        Args:
            pages: flat; the pieces' bytes are in it.
        """
        whole = pages.data
        for spot in spots:
            start, size = spot.bytes(self._geometry)
            piece = whole[start : start + size]
            if copy == "framed":
                self._link.send_piece(ROOM, spot.page, spot.first_layer, piece)
                continue
            if copy == "hashed":
                self._socket.sendall(xxh3_64_intdigest(piece).to_bytes(DIGEST_BYTES, "little"))
            self._socket.sendall(piece)
        assert self._socket.recv(1) == b"k"

    def receive(self, copy: str, spots: Sequence[Spot]) -> None:
        """Raises ValueError where a checksum differs."""
        for spot, buffer in zip(spots, itertools.cycle(self._buffers), strict=False):
            if copy == "framed":
                self._link.read_piece(self._link.read_header())
                continue
            _, size = spot.bytes(self._geometry)
            if copy == "hashed":
                self._hashed(buffer[:size])
            else:
                self._fill(buffer[:size])
        self._socket.sendall(b"k")

    def _fill(self, view: memoryview) -> None:
        got = 0
        while got < len(view):
            got += self._took(view[got:])

    def _hashed(self, view: memoryview) -> None:
        """In parts, each while the cache still has it, as `Link` does."""
        told = bytearray(DIGEST_BYTES)
        self._fill(memoryview(told))
        check, got = xxh3_64(), 0
        while got < len(view):
            count = self._took(view[got : got + PART_BYTES])
            check.update(view[got : got + count])
            got += count
        if check.intdigest() != int.from_bytes(told, "little"):
            raise ValueError("a piece was corrupted")

    def _took(self, view: memoryview) -> int:
        count = self._socket.recv_into(view)
        if count == 0:
            raise EOFError("the other end is gone")
        return count


def listening() -> socket.socket:
    """On loopback, set up as a sender's data port."""
    listener = socket.create_server(("127.0.0.1", 0))
    SocketOptions().listening(listener)
    return listener
