"""TLS 1.3 over any other transport; both ends present and require the cluster's certificate.

The certificate is the cluster's own, self-signed, and the only one that either end trusts: a
name in it means nothing, a chain is not followed. The handshake is part of the first send or
receive, on the connection's own thread: whatever bounds an unproved peer (a sender cuts it
after 5 s, a receiver gives a silent one up after 5 s) bounds it too, and `unblock` ends it.

OpenSSL works in memory here and never on the socket, so that one thread can read while another
writes, and neither holds a lock while it waits. A record of up to 16 KiB is a sign of life when
it is complete: a link needs more than 3.3 KB/s.
"""

from __future__ import annotations

import ssl
import tempfile
import threading
from collections.abc import Sequence
from typing import cast

import msgspec

from pdctl.errors import PeerLost
from pdctl.handoff.transport.interface import Connection, Listener, Transport

ENCRYPTED_BYTES = 128 << 10
"""Plain bytes that are encrypted, then sent, at a time."""
RECEIVED_BYTES = 128 << 10


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster's, with its private key; made at `up`, the same on every host."""

    certificate_pem: str
    key_pem: str

    def __repr__(self) -> str:
        return "Certificate(…)"


def make_context(certificate: Certificate, *, server: bool) -> ssl.SSLContext:
    """The library loads a key only from a file: it lies in one of mode 0600 while this runs."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.certificate_pem)
    if server:
        # nothing is resumed; and a ticket would lie unread on a connection that waits
        context.num_tickets = 0
    with tempfile.NamedTemporaryFile("w", prefix="pdctl-", suffix=".pem") as file:
        file.write(certificate.key_pem + certificate.certificate_pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context


class TlsConnection:
    """A `Connection` over another one, which it owns."""

    def __init__(self, inner: Connection, context: ssl.SSLContext, *, server: bool) -> None:
        self.peer = inner.peer
        self._inner = inner
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=server)
        self._lock = threading.Lock()
        """Around every call of OpenSSL; none of them waits for anything."""
        self._greeting = threading.Lock()
        self._greeted = False
        self._unsent = b""
        """Encrypted and not sent yet: the stream goes on only after it."""
        self._buffer: memoryview | None = None

    def send(self, parts: Sequence[memoryview]) -> int:
        self._greet()
        taken = 0
        with self._lock:
            for part in parts:
                plain = part.cast("B")[: ENCRYPTED_BYTES - taken]
                taken += self._encrypted(plain)
        self._flush()
        return taken

    def send_now(self, frame: bytes) -> bool:
        """As the seam says; a frame that could not leave at once may follow later, before
        whatever is sent next."""
        if not self._greeted:
            return False
        with self._lock:
            if self._unsent:
                return False
            self._encrypted(memoryview(frame))
            record = self._leaving.read()
        if self._inner.send_now(record):
            return True
        self._unsent = record
        return False

    def recv_into(self, view: memoryview) -> int:
        self._greet()
        while True:
            count = self._decrypted(view)
            if count is not None:
                return count
            self._receive()

    def quiet(self) -> bool:
        with self._lock:
            if self._tls.pending() or self._arrived.pending:
                return False
        return self._inner.quiet()

    def unblock(self) -> None:
        self._inner.unblock()

    def close(self) -> None:
        self._inner.close()

    def _greet(self) -> None:
        """The handshake, once; blocks until it is over. Raises PeerLost."""
        if self._greeted:
            return
        with self._greeting:
            while not self._greeted:
                try:
                    with self._lock:
                        self._tls.do_handshake()
                    self._greeted = True
                    self._flush()
                except ssl.SSLWantReadError:
                    self._flush()
                    self._receive()
                except ssl.SSLError as error:
                    self._refuse(error)

    def _refuse(self, error: ssl.SSLError) -> None:
        try:
            # the alert that tells the peer why
            self._flush()
        except PeerLost:
            self.unblock()
        raise self._lost(error) from error

    def _encrypted(self, plain: memoryview) -> int:
        """All of `plain`, into memory; with the lock held. Returns its size."""
        taken = 0
        try:
            while taken < plain.nbytes:
                taken += self._tls.write(plain[taken:])
        except ssl.SSLError as error:
            raise self._lost(error) from error
        return taken

    def _decrypted(self, view: memoryview) -> int | None:
        """Plain bytes that are there; 0 at the end of the stream, None where more must come."""
        got = 0
        with self._lock:
            try:
                while got < view.nbytes:
                    # with a buffer, which may be any writable one, it returns how much it read
                    buffer = cast(bytearray, view[got:])
                    count = cast(int, self._tls.read(view.nbytes - got, buffer))
                    if count == 0:
                        break
                    got += count
            except ssl.SSLWantReadError:
                return got or None
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return got
            except ssl.SSLError as error:
                if got == 0:
                    raise self._lost(error) from error
        return got

    def _receive(self) -> None:
        if self._buffer is None:
            self._buffer = memoryview(bytearray(RECEIVED_BYTES))
        count = self._inner.recv_into(self._buffer)
        with self._lock:
            if count:
                self._arrived.write(self._buffer[:count])
            else:
                self._arrived.write_eof()

    def _flush(self) -> None:
        with self._lock:
            left = memoryview(self._unsent + self._leaving.read())
        while left:
            left = left[self._inner.send([left]) :]
        self._unsent = b""

    def _lost(self, error: ssl.SSLError) -> PeerLost:
        return PeerLost(
            f"TLS with {self.peer} failed: {reason_of(error)}",
            hint="the peer must belong to the same `pdctl up`, with the same handoff.encrypt",
        )


def reason_of(error: ssl.SSLError) -> str:
    """OpenSSL's words, without its file names."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not the cluster's ({error.verify_message})"
    if isinstance(error, ssl.SSLEOFError):
        return "it closed the connection"
    return (error.reason or str(error)).replace("_", " ").lower()


class TlsListener:
    def __init__(self, inner: Listener, context: ssl.SSLContext) -> None:
        self.port = inner.port
        self._inner = inner
        self._context = context

    def accept(self) -> TlsConnection | None:
        """Only accepts: the handshake is the connection's own thread's."""
        connection = self._inner.accept()
        if connection is None:
            return None
        return TlsConnection(connection, self._context, server=True)

    def close(self) -> None:
        self._inner.close()


class TlsTransport:
    def __init__(self, inner: Transport, certificate: Certificate) -> None:
        self._inner = inner
        self._server = make_context(certificate, server=True)
        self._client = make_context(certificate, server=False)

    def listen(self, address: tuple[str, int]) -> TlsListener:
        return TlsListener(self._inner.listen(address), self._server)

    def dial(self, address: tuple[str, int], timeout_s: float) -> TlsConnection:
        """Connects only: the handshake is part of the first send or receive."""
        return TlsConnection(self._inner.dial(address, timeout_s), self._client, server=False)
