"""Pieces of pages into an engine's KV memory on a GPU, as they arrive, several at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdctl.engines.cuda.kernel import DEVICE_PROGRAMS, PROGRAMS, Copies
from pdctl.engines.cuda.stream import Mark, SideStream
from pdctl.handoff.arena import Bytes
from pdctl.handoff.page import PATTERN, Patterns
from pdctl.handoff.sink import HELD_PIECES

BATCH_PIECES = HELD_PIECES // 2
"""Copied together, while as many more are received: a launch costs more than it copies."""


class Piece(NamedTuple):
    rows: NDArray[np.int64]
    """`[2, tokens]`: places and addresses, as `kernel.Tokens` has them."""
    layers: range
    source: object
    """What the addresses are in."""


class Copying:
    """Copies under way; what they read is kept as long as this is."""

    def __init__(self, mark: Mark, kept: object) -> None:
        self._mark, self._kept = mark, kept

    def synchronize(self) -> None:
        self._mark.synchronize()

    def query(self) -> bool:
        return self._mark.query()


class _Thread(threading.local):
    """One handoff's thread: pieces that have come, and those that are being copied."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.copying: Copying | None = None
        self.near: list[Bytes] = []
        """For pieces that lie elsewhere, in turn: by when one is used again, it has been read."""
        self.turn = 0

    def wait(self) -> None:
        if self.copying is not None:
            self.copying.synchronize()
            self.copying = None


class Writer:
    """`write` any number of times, then `flush`, by the threads of several handoffs.

    Args:
        memory: makes page-locked memory: pieces that lie elsewhere are copied into it first.
    """

    def __init__(self, copies: Copies, side: SideStream, memory: Callable[[int], Bytes]) -> None:
        self._copies, self._side, self._memory = copies, side, memory
        self._thread = _Thread()
        self._spare: deque[Bytes] = deque()
        """Such memory that no thread uses: making it takes milliseconds."""

    def write(
        self, places: NDArray[np.int64], first_slot: int, first_layer: int, piece: Patterns
    ) -> None:
        """Args:
        places: as `kernel.Tokens` has them, of the tokens from the piece's `first_slot` on.
        piece: `[layers, 2, page_tokens, kv_heads, head_dim]`; it stays as it is while
            `HELD_PIECES` more are written, or until `flush`.
        """
        source = self._locked(piece)
        slots = np.arange(first_slot, first_slot + len(places))
        addresses = source.ctypes.data + slots * source.strides[2]
        layers = range(first_layer, first_layer + len(piece))
        self._thread.pieces.append(Piece(np.stack([places, addresses]), layers, source))
        if len(self._thread.pieces) == BATCH_PIECES:
            self._scatter()

    def write_from(self, pieces: Sequence[Piece]) -> Copying:
        """Begins to copy pieces that lie in the device's own memory; `flush` waits for them too.
        The caller keeps what comes back until it is over. Where it raises, nothing of this thread's
        is under way."""
        try:
            copying = self.begin(pieces, programs=DEVICE_PROGRAMS)
        except BaseException:
            self._side.run(lambda: None).synchronize()
            raise
        self._thread.copying = copying
        return copying

    def flush(self) -> None:
        """What this thread has written stands in the engine's memory."""
        if self._thread.pieces:
            self._scatter()
        self._thread.wait()
        self._spare.extend(self._thread.near)
        self._thread.near, self._thread.turn = [], 0

    def begin(self, pieces: Sequence[Piece], *, programs: int = PROGRAMS) -> Copying:
        """One launch for those of the same layers; the caller keeps what comes back until it is
        over.

        Args:
            programs: as `Copies` takes them.
        """
        alike = dict[range, list[NDArray[np.int64]]]()
        for piece in pieces:
            alike.setdefault(piece.layers, []).append(piece.rows)
        tokens = {
            layers: self._copies.tokens(np.concatenate(rows, axis=1))
            for layers, rows in alike.items()
        }

        def copy() -> None:
            for layers, those in tokens.items():
                self._copies.from_pages(those, layers, programs=programs)

        return Copying(self._side.run(copy), (pieces, tokens))

    def _scatter(self) -> None:
        """Begins what this thread has gathered, and waits for what it had begun before."""
        thread = self._thread
        pieces, thread.pieces = thread.pieces, []
        copying = self.begin(pieces)
        thread.wait()
        thread.copying = copying

    def _locked(self, piece: Patterns) -> Patterns:
        """The piece, in memory that the GPU reads."""
        if self._copies.reaches(piece):
            return piece
        copy = self._near(piece.nbytes).view(PATTERN).reshape(piece.shape)
        copy[:] = piece
        return copy

    def _near(self, size: int) -> Bytes:
        thread = self._thread
        at, thread.turn = thread.turn, (thread.turn + 1) % (2 * BATCH_PIECES)
        if at == len(thread.near):
            thread.near.append(self._spared(size))
        if thread.near[at].nbytes < size:
            thread.near[at] = self._memory(size)
        return thread.near[at][:size]

    def _spared(self, size: int) -> Bytes:
        try:
            return self._spare.pop()
        except IndexError:
            return self._memory(size)
