"""Frames over one connection, with the times at which the peer was heard and spoken to."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from xxhash import xxh3_64, xxh3_64_intdigest

from pdctl.errors import PeerLost
from pdctl.handoff import wire
from pdctl.handoff.arena import Bytes
from pdctl.handoff.lease import Life
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.schedule import PIECE_BYTES
from pdctl.handoff.sink import HELD_PIECES
from pdctl.handoff.transport.interface import Connection
from pdctl.handoff.transport.reach import address_of

PART_BYTES = 256 << 10
"""Received at a time: what is hashed next is still in the core's own cache."""


class PieceCheck:
    """The checksum of a body that comes in parts, each hashed while the cache still has it."""

    def __init__(self, header: wire.Header) -> None:
        self._header = header
        self._hash = xxh3_64(seed=header.seed)
        self.update = self._hash.update

    def finish(self) -> None:
        """Raises ProtocolViolation where the parts are not what was sent."""
        if self._hash.intdigest() != self._header.checksum:
            raise wire.corrupted(self._header)


class Link:
    """One thread reads; any thread sends: frames never mix.

    Args:
        memory: makes what pieces are received into; None: ordinary memory.
        held_pieces: how many of the last pieces stay as they were in memory that was given.

    `life.heard_at` follows every received byte and `life.spoke_at` every sent one, so that a
    slow piece is a sign of life from its first byte to its last (R5).
    """

    def __init__(
        self,
        connection: Connection,
        geometry: PageGeometry,
        clock: Callable[[], float],
        memory: Callable[[int], Bytes] | None = None,
        held_pieces: int = HELD_PIECES,
    ) -> None:
        self.connection = connection
        self.geometry = geometry
        self.clock = clock
        self.life = Life(clock())
        self.reused = False
        """Whether it has served a room before: its peer may have given it up meanwhile."""
        self.round_trip_s = 0.0
        """Between this end's proof and the peer's; of the dialling end, once they have met."""
        self.card = b""
        """How the sender's memory is read, where pieces come that way; else empty."""
        self.payload_at = clock()
        """When a byte of a page was last sent or received."""
        self.payload_bytes = 0
        """Of pages received, ever."""
        self._memory = memory
        self._held_pieces = 1 if memory is None else held_pieces
        self._sending = threading.Lock()
        self._scratch: deque[memoryview] = deque()
        self._header = memoryview(bytearray(wire.HEADER_BYTES))

    def send(self, message: wire.Message, room: int = 0, *, fingerprint: str = "") -> None:
        """Blocks until the kernel has all of it. Raises PeerLost."""
        with self._sending:
            self._send([memoryview(wire.frame(message, room, fingerprint=fingerprint))])

    def send_piece(self, room: int, page: int, first_layer: int, piece: memoryview) -> None:
        """`piece`: bytes of whole layers, contiguous, unchanged until this returns."""
        layers = piece.nbytes // self.geometry.layer_bytes
        header = wire.piece_header(room, page, first_layer, layers, piece)
        with self._sending:
            self._send([memoryview(header), piece], payload=True)

    def send_placed(self, room: int, page: int, first_layer: int, piece: memoryview) -> None:
        """As `send_piece`, but it says only where the piece lies, unchanged until End is sent."""
        layers = piece.nbytes // self.geometry.layer_bytes
        placed = wire.Placed(address=address_of(piece), device=0, xxh3=xxh3_64_intdigest(piece))
        frame = wire.placed_frame(room, page, first_layer, layers, placed)
        with self._sending:
            self._send([memoryview(frame)], payload=True)

    def send_spread(self, room: int, device: int, spots: tuple[wire.Spot, ...]) -> None:
        """As `send_placed`, of pieces in a device's memory."""
        frame = wire.frame(wire.Spread(device=device, spots=spots), room)
        with self._sending:
            self._send([memoryview(frame)], payload=True)

    def _send(self, parts: list[memoryview], *, payload: bool = False) -> None:
        while parts:
            taken = self.connection.send(parts)
            self.life.spoke_at = now = self.clock()
            if payload:
                self.payload_at = now
            while parts and taken >= parts[0].nbytes:
                taken -= parts.pop(0).nbytes
            if taken:
                parts[0] = parts[0][taken:]

    def send_now(self, message: wire.Message, room: int, *, patience_s: float = 0.0) -> bool:
        """Without blocking on the network; False where it could not be sent. Never raises.

        Args:
            patience_s: how long another thread's frame may take to get out of the way.
        """
        if not self._sending.acquire(timeout=patience_s):
            return False
        try:
            sent = self.connection.send_now(wire.frame(message, room))
        except PeerLost:
            return False
        finally:
            self._sending.release()
        if sent:
            self.life.spoke_at = self.clock()
        return sent

    def read_header(self) -> wire.Header:
        """Raises PeerLost at the end of the stream, ProtocolViolation."""
        self._fill(self._header)
        return wire.read_header(self._header, self.geometry)

    def read_body(self, header: wire.Header) -> bytes:
        """The body of everything but Pages, unchecked."""
        body = bytearray(header.length)
        self._fill(memoryview(body))
        return bytes(body)

    def read_message(self, header: wire.Header) -> wire.Message:
        return wire.read_body(header, self.read_body(header))

    def read_piece(self, header: wire.Header) -> memoryview:
        """A piece, its checksum compared; valid until the next one is read, or, in memory that
        was given, until `held_pieces` more are."""
        piece = self._next_scratch(header.length)[: header.length]
        check, got = PieceCheck(header), 0
        while got < header.length:
            count = self._receive(piece[got : got + PART_BYTES])
            self.payload_at = self.life.heard_at
            self.payload_bytes += count
            check.update(piece[got : got + count])
            got += count
        check.finish()
        return piece

    def kept(self, piece: memoryview) -> memoryview:
        """A piece that was read elsewhere: in memory that was given, a copy of it that is valid
        as long as one of `read_piece`."""
        if self._memory is None:
            return piece
        copy = self._next_scratch(piece.nbytes)[: piece.nbytes]
        copy[:] = piece
        return copy

    def _next_scratch(self, length: int) -> memoryview:
        full = len(self._scratch) == self._held_pieces
        oldest = self._scratch.popleft() if full else memoryview(b"")
        if oldest.nbytes < length:
            oldest = self._made(min(max(length, PIECE_BYTES), self.geometry.page_bytes))
        self._scratch.append(oldest)
        return oldest

    def _made(self, size: int) -> memoryview:
        return memoryview(bytearray(size)) if self._memory is None else self._memory(size).data

    def _fill(self, view: memoryview) -> None:
        got, size = 0, view.nbytes
        while got < size:
            got += self._receive(view[got:])

    def _receive(self, view: memoryview) -> int:
        count = self.connection.recv_into(view)
        if count == 0:
            raise PeerLost(f"{self.connection.peer} closed the connection")
        self.life.heard_at = self.clock()
        return count
