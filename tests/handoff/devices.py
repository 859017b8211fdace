"""Memory that the handoff treats as a device's, in this process, and a sink that takes pieces from
it as late as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from pdctl.errors import HandoffError
from pdctl.handoff.device import MemoryKind, Pages, Run
from pdctl.handoff.page import PATTERN, PageGeometry, Patterns
from pdctl.handoff.sink import Piece, Want


class ArrayMemory:
    """A `DeviceMemory`, full of ones: nothing may rely on zeros."""

    kind = MemoryKind.HOST
    index = 0

    def __init__(self, size: int) -> None:
        self.array = np.full(size, 0xFF, np.uint8)
        self.address = self.array.ctypes.data
        self.size = size
        self.bound: set[int] = set()

    def bind(self) -> None:
        self.bound.add(threading.get_ident())

    def clear(self, offset: int, size: int, every: int, times: int) -> None:
        for start in range(offset, offset + every * times, every):
            self.array[start : start + size] = 0


class Arrays:
    """A `DeviceMaker` that remembers what it made."""

    kind = MemoryKind.HOST

    def __init__(self) -> None:
        self.made: list[ArrayMemory] = []

    def __call__(self, size: int) -> ArrayMemory:
        self.made.append(ArrayMemory(size))
        return self.made[-1]


def as_array(pages: Pages, shape: Sequence[int]) -> Patterns:
    """Pages of that shape each, or a piece's layers, wherever they lie."""
    if not isinstance(pages, Run):
        return pages
    raw = pages.memory.array[pages.offset : pages.offset + pages.size]
    return raw.view(PATTERN).reshape(-1, *shape)


class DeviceSink:
    """A decode engine whose copies are over when `land` is set, or at once."""

    def __init__(self, geometry: PageGeometry, *, spare: int = 1, held_tokens: int = 0) -> None:
        self._geometry, self._spare, self._held_tokens = geometry, spare, held_tokens
        self.land = threading.Event()
        self.land.set()
        self.begun = threading.Event()
        self.settled = threading.Event()
        self.error: HandoffError | None = None
        self.raises: Exception | None = None
        self.batches: list[int] = []
        self.committed = False
        self._waiting: list[tuple[Sequence[Piece], list[bool]]] = []
        self._lock = threading.Lock()

    def offered(self, tokens: int, deadline: float) -> Want:
        want = Want(tokens=tokens - self._spare, held_tokens=self._held_tokens)
        self.pages = self._geometry.empty(want.tokens)
        return want

    def write_from(self, pieces: Sequence[Piece]) -> Callable[[], bool]:
        if self.raises is not None:
            raise self.raises
        self.batches.append(sum(piece.pages for piece in pieces))
        over: list[bool] = []
        self._waiting.append((pieces, over))
        self.begun.set()

        def placed() -> bool:
            if self.land.is_set():
                self._place()
            return bool(over)

        return placed

    def commit(self, first_token: int | None) -> None:
        self.land.wait()
        self._place()
        self.committed = True
        self.settled.set()

    def abort(self, error: HandoffError) -> None:
        self.land.wait()
        self._place()
        self.error = error
        self.settled.set()

    def _place(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            for pieces, over in waiting:
                for piece in pieces:
                    shape = self._geometry.shape[1:]
                    found = as_array(piece.at, shape).reshape(piece.pages, piece.layers, *shape)
                    last = piece.first_layer + piece.layers
                    pages = slice(piece.page, piece.page + piece.pages)
                    self.pages[pages, piece.first_layer : last] = found
                over.append(True)
