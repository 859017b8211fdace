"""The way between a decode and a prefill replica, in a test's hands: a TCP proxy that knows
where the frames of the handoff end."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from engine.faults import INSIDE

from pdctl.handoff.wire import HEADER_BYTES, Kind

HELD_S = 60.0
CHUNK_BYTES = 16 << 10
BODY_LENGTH = struct.Struct("<I")
LENGTH_AT = 24
RESET = struct.pack("ii", 1, 0)


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One message, header and body."""

    kind: Kind
    count: int
    """How many of its kind came before it, in its direction, since the link was whole."""
    raw: bytes

    @property
    def length(self) -> int:
        return len(self.raw) - HEADER_BYTES

    def with_length(self, length: int) -> bytes:
        return self.raw[:LENGTH_AT] + BODY_LENGTH.pack(length) + self.raw[LENGTH_AT + 4 :]


class Cut(Exception):
    """Both ends of the connection are reset, after `last` was passed on."""

    def __init__(self, last: bytes = b"") -> None:
        super().__init__("cut")
        self.last = last


Edit = Callable[[Frame], Sequence[bytes]]


def whole(frame: Frame) -> Sequence[bytes]:
    """Nothing is changed."""
    return (frame.raw,)


class DataLink:
    """Proxy on loopback before `target`; a context manager.

    `to_decode` and `to_prefill` edit each frame of their direction. `hold(n)` stops both
    directions once `n` pages have gone; `release` lets all go on.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.to_decode: Edit = whole
        self.to_prefill: Edit = whole
        self.bytes_per_s: float | None = None
        self.held = threading.Event()
        self.dialled = 0
        """Connections so far."""
        self._go_on = threading.Event()
        self._go_on.set()
        self._hold_after: int | None = None
        self._counts: dict[tuple[str, Kind], int] = {}
        self._closed = False
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])

    def __enter__(self) -> DataLink:
        threading.Thread(target=self._accept, name="data-link", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._go_on.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    # -- what a test does to it

    def hold(self, pages: int) -> None:
        """Both directions stop after that many more pages; `held` is set then."""
        self.mend()
        self._hold_after = pages
        self._go_on.clear()

    def release(self) -> None:
        self._hold_after = None
        self._go_on.set()

    def mend(self) -> None:
        """Whole again: nothing is edited, held, or slow."""
        self.to_decode = self.to_prefill = whole
        self.bytes_per_s = None
        self.release()
        self.held.clear()
        with self._lock:
            self._counts.clear()

    def cut(self) -> None:
        """Resets every connection."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            _reset(each)

    # -- inside

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self.target, timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self.dialled += 1
            with self._lock:
                self._sockets += [near, far]
            for source, sink, way in ((far, near, "to_decode"), (near, far, "to_prefill")):
                threading.Thread(target=self._pump, args=(source, sink, way), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            for frame in self._frames(source, way):
                self._wait(frame, way)
                edit: Edit = getattr(self, way)
                for raw in edit(frame):
                    self._send(sink, raw)
        except Cut as cut:
            with contextlib.suppress(OSError):
                sink.sendall(cut.last)
            _reset(source)
            _reset(sink)
        except (OSError, ValueError):
            for each in (source, sink):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _frames(self, source: socket.socket, way: str) -> Iterator[Frame]:
        """Ends by ValueError at the end of the stream."""
        stream = source.makefile("rb")
        while True:
            header = stream.read(HEADER_BYTES)
            if len(header) < HEADER_BYTES:
                raise ValueError("end of stream")
            (length,) = BODY_LENGTH.unpack_from(header, LENGTH_AT)
            body = stream.read(length)
            kind = Kind(header[5])
            with self._lock:
                count = self._counts.get((way, kind), 0)
                self._counts[way, kind] = count + 1
            yield Frame(kind=kind, count=count, raw=header + body)

    def _wait(self, frame: Frame, way: str) -> None:
        after = self._hold_after
        if after is None:
            return
        if way == "to_decode":
            if frame.kind is not Kind.PAGES or frame.count < after:
                return
            self.held.set()
        elif not self.held.is_set():
            return
        self._go_on.wait(HELD_S)

    def _send(self, sink: socket.socket, raw: bytes) -> None:
        for at in range(0, len(raw), CHUNK_BYTES):
            part = raw[at : at + CHUNK_BYTES]
            sink.sendall(part)
            rate = self.bytes_per_s
            if rate is not None:
                time.sleep(len(part) / rate)


def ways(links: Iterable[DataLink]) -> dict[str, str]:
    """Environment with which a process dials these links instead of their targets."""
    pairs = " ".join(f"{link.target[1]}:{link.port}" for link in links)
    return {"PYTHONPATH": str(INSIDE), "PDCTL_TEST_WAYS": pairs}


def _reset(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()


# -- edits of the pages, each from the third on


def cut_off(frame: Frame) -> Sequence[bytes]:
    """The connection ends in the middle of a page."""
    if _is_page(frame, 2):
        raise Cut(frame.raw[: len(frame.raw) // 2])
    return (frame.raw,)


def truncated(frame: Frame) -> Sequence[bytes]:
    """Half of a page is missing; the next frame follows at once."""
    return (frame.raw[: len(frame.raw) // 2],) if _is_page(frame, 2) else (frame.raw,)


def duplicated(frame: Frame) -> Sequence[bytes]:
    return (frame.raw, frame.raw) if _is_page(frame, 2) else (frame.raw,)


def skipped(frame: Frame) -> Sequence[bytes]:
    return () if _is_page(frame, 2) else (frame.raw,)


class Reordered:
    """The third page comes after the fourth."""

    def __init__(self) -> None:
        self._kept = b""

    def __call__(self, frame: Frame) -> Sequence[bytes]:
        if _is_page(frame, 2):
            self._kept = frame.raw
            return ()
        if _is_page(frame, 3):
            return (frame.raw, self._kept)
        return (frame.raw,)


def oversized(frame: Frame) -> Sequence[bytes]:
    """A header that asks for 2 GiB."""
    return (frame.with_length(1 << 31),) if _is_page(frame, 2) else (frame.raw,)


def flipped(frame: Frame) -> Sequence[bytes]:
    """One bit of a page differs."""
    if not _is_page(frame, 2):
        return (frame.raw,)
    middle = len(frame.raw) // 2
    return (frame.raw[:middle] + bytes((frame.raw[middle] ^ 1,)) + frame.raw[middle + 1 :],)


def garbage(frame: Frame) -> Sequence[bytes]:
    return (random.Random(7).randbytes(len(frame.raw)),) if _is_page(frame, 2) else (frame.raw,)


def garbled_grant(frame: Frame) -> Sequence[bytes]:
    """What the receiver says is noise."""
    if frame.kind is Kind.GRANT and frame.count == 0:
        return (random.Random(8).randbytes(len(frame.raw)),)
    return (frame.raw,)


def _is_page(frame: Frame, count: int) -> bool:
    return frame.kind is Kind.PAGES and frame.count == count
