"""A trial connection: is the right listener reached at an address, how far, how fast?

    dialler                                    listener
    MAGIC, SHA-256(token, "dial")      →
                                       ←       MAGIC, SHA-256(token, "answer")
    b"P"                               →
                                       ←       b"P"              as often as wanted
    b"M", count (8 bytes, big-endian)  →
                                       ←       that many bytes

The listening socket is closed before the first right dialler is answered: once a dialler has
returned, the port is free again. Who sends anything else is hung up on. Both ends are bounded.

With `encrypt` all of it is under TLS 1.3, with a certificate that both ends derive from the token.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import ssl
import statistics
import threading

from pdctl.handoff.transport.tls import make_context
from pdctl.runtime.cluster.certificate import cluster_certificate
from pdctl.runtime.hosts.survey import Dialled
from pdctl.trace import monotonic_s

MAGIC = b"pdctl trial 1\n"
ROUND_TRIPS = 9
MAX_MEASURED_BYTES = 1 << 30
MEASURE_S = 2.0
"""A measurement ends after this time, or with its last byte."""
WARM_BYTES = 1 << 20
"""Read before the clock of a measurement starts: TCP's slow start is not the link."""
HANDSHAKE_S = 2.0
MAX_STRANGERS = 16
_PIECE = bytes(1 << 20)


def _proof(token: str, side: str) -> bytes:
    return MAGIC + hashlib.sha256(f"pdctl.trial.{side}:{token}".encode()).digest()


PROOF_BYTES = len(MAGIC) + 32


def _context(token: str, *, server: bool) -> ssl.SSLContext:
    key = hashlib.sha256(f"pdctl.trial.tls:{token}".encode()).hexdigest()
    return make_context(cluster_certificate(key), server=server)


def resolve(address: tuple[str, int], *, passive: bool = False) -> tuple[int, tuple[object, ...]]:
    """(family, socket address) of the first meaning of a host and a port; socket.gaierror."""
    host, port = address
    flags = socket.AI_PASSIVE if passive else 0
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]
    return family, where


class Answering:
    """One listener, with its thread; it ends by itself."""

    def __init__(
        self, address: tuple[str, int], token: str, for_s: float, *, encrypt: bool = False
    ) -> None:
        """Listens when it returns; OSError (socket.gaierror too) where it can't."""
        family, where = resolve(address, passive=True)
        self._token = token
        self._context = _context(token, server=True) if encrypt else None
        self._until_s = monotonic_s() + for_s
        self._strangers = threading.Semaphore(MAX_STRANGERS)
        self._won = threading.Lock()
        self._closed = threading.Event()
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(where)
            self._socket.listen(MAX_STRANGERS)
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._accept, name="pdctl-answer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The port is free afterwards; idempotent."""
        self._stop_listening()
        self._thread.join()

    def _stop_listening(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept on Linux
        self._socket.close()

    def _accept(self) -> None:
        try:
            while not self._closed.is_set() and (left_s := self._until_s - monotonic_s()) > 0:
                self._socket.settimeout(min(left_s, 0.2))
                try:
                    connected, _ = self._socket.accept()
                except TimeoutError:
                    continue
                if not self._strangers.acquire(blocking=False):
                    connected.close()
                    continue
                threading.Thread(target=self._serve, args=(connected,), daemon=True).start()
        except OSError:
            pass  # closed meanwhile
        finally:
            self._socket.close()

    def _serve(self, connected: socket.socket) -> None:
        try:
            with connected, contextlib.suppress(OSError, EOFError):
                _prepare(connected, HANDSHAKE_S)
                if self._context is None:
                    return self._meet(connected)
                with self._context.wrap_socket(connected, server_side=True) as encrypted:
                    self._meet(encrypted)
        finally:
            self._strangers.release()

    def _meet(self, connected: socket.socket) -> None:
        said = _exactly(connected, PROOF_BYTES)
        if not hmac.compare_digest(said, _proof(self._token, "dial")):
            return
        if not self._won.acquire(blocking=False):
            return
        self._stop_listening()
        connected.sendall(_proof(self._token, "answer"))
        self._converse(connected)

    def _converse(self, connected: socket.socket) -> None:
        while (left_s := self._until_s - monotonic_s()) > 0:
            connected.settimeout(left_s)
            asked = connected.recv(1)
            if asked == b"P":
                connected.sendall(asked)
            elif asked == b"M":
                count = int.from_bytes(_exactly(connected, 8))
                _pour(connected, min(count, MAX_MEASURED_BYTES), self._until_s)
            else:
                return


def _pour(connected: socket.socket, count: int, until_s: float) -> None:
    while count > 0 and (left_s := until_s - monotonic_s()) > 0:
        connected.settimeout(left_s)
        piece = memoryview(_PIECE)[: min(count, len(_PIECE))]
        count -= connected.send(piece)


def dial(
    address: tuple[str, int],
    token: str,
    *,
    timeout_s: float,
    measure_bytes: int = 0,
    encrypt: bool = False,
) -> Dialled:
    """Dials an `Answering` at `address`; whatever goes wrong is told in `error`."""
    until_s = monotonic_s() + timeout_s
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return Dialled(error=f"{address[0]} does not resolve")
    resolved, took = str(found[0][4][0]), False
    try:
        with _connected([(family, where) for family, *_, where in found], until_s) as connected:
            resolved, took = str(connected.getpeername()[0]), True
            _prepare(connected, timeout_s)
            if encrypt:
                with _context(token, server=False).wrap_socket(connected) as encrypted:
                    took_s, speed = _ask(encrypted, token, measure_bytes, until_s)
            else:
                took_s, speed = _ask(connected, token, measure_bytes, until_s)
    except TimeoutError:
        reason = f"no answer within {timeout_s:g} s"
    except (EOFError, ssl.SSLError):
        reason = "something else listens there"
    except OSError as error:
        reason = _reason(error)
    else:
        return Dialled(connected=True, resolved=resolved, round_trip_s=took_s, bytes_per_s=speed)
    return Dialled(error=reason, connected=took, resolved=resolved)


def _ask(
    connected: socket.socket, token: str, measure_bytes: int, until_s: float
) -> tuple[float, float | None]:
    """(round trip, bytes per second where they were asked for); EOFError: it is not the right
    listener."""
    connected.sendall(_proof(token, "dial"))
    said = _exactly(connected, PROOF_BYTES)
    if not hmac.compare_digest(said, _proof(token, "answer")):
        raise EOFError
    round_trip_s = _round_trip(connected, until_s)
    return round_trip_s, _measure(connected, measure_bytes, until_s) if measure_bytes else None


def _connected(candidates: list[tuple[int, tuple[object, ...]]], until_s: float) -> socket.socket:
    """The first of a name's addresses that takes the connection, as a receiver tries them; each
    gets its share of the time. Raises the last OSError."""
    for left, (family, where) in zip(range(len(candidates), 0, -1), candidates, strict=True):
        connected = socket.socket(family, socket.SOCK_STREAM)
        try:
            connected.settimeout(max(0.001, (until_s - monotonic_s()) / left))
            connected.connect(where)
        except OSError:
            connected.close()
            if left == 1:
                raise
        except BaseException:
            connected.close()
            raise
        else:
            return connected
    raise OSError("no address")


def _round_trip(connected: socket.socket, until_s: float) -> float:
    """Seconds; the median."""
    took = []
    for _ in range(ROUND_TRIPS):
        _bound(connected, until_s)
        began_s = monotonic_s()
        connected.sendall(b"P")
        _exactly(connected, 1)
        took.append(monotonic_s() - began_s)
    return statistics.median(took)


def _measure(connected: socket.socket, count: int, until_s: float) -> float:
    """Bytes per second that arrive, once it flows; as much as comes within `MEASURE_S`."""
    count = min(count, MAX_MEASURED_BYTES)
    connected.sendall(b"M" + count.to_bytes(8))
    buffer = memoryview(bytearray(1 << 20))
    got = start_bytes = 0
    start_s = monotonic_s()
    end_s = min(until_s, start_s + MEASURE_S)
    while got < count and monotonic_s() < end_s:
        _bound(connected, until_s)
        read = connected.recv_into(buffer)
        if not read:
            raise ConnectionResetError
        got += read
        if not start_bytes and got >= min(WARM_BYTES, count // 4):
            start_bytes, start_s = got, monotonic_s()
    return max(got - start_bytes, 1) / max(monotonic_s() - start_s, 1e-9)


def _bound(connected: socket.socket, until_s: float) -> None:
    left_s = until_s - monotonic_s()
    if left_s <= 0:
        raise TimeoutError
    connected.settimeout(left_s)


def _prepare(connected: socket.socket, timeout_s: float) -> None:
    connected.settimeout(timeout_s)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _exactly(connected: socket.socket, count: int) -> bytes:
    """Raises EOFError where the other end stops early."""
    got = b""
    while len(got) < count:
        piece = connected.recv(count - len(got))
        if not piece:
            raise EOFError
        got += piece
    return got


def _reason(error: OSError) -> str:
    """In words, without the number."""
    return (error.strerror or str(error) or type(error).__name__).lower()
