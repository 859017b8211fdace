"""TCP, raw sockets. Socket buffers are left to the kernel: measured, that is fastest."""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Sequence

from pdctl.errors import PeerLost
from pdctl.handoff.transport.sockets import SocketOptions

log = logging.getLogger("pdctl.handoff")

BACKLOG = 128


def parse_address(text: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port".

    Raises:
        PeerLost: anything else.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    valid = colon and host and port.isascii() and port.isdigit() and len(port) <= 5
    if not valid or not 0 < int(port) < 1 << 16:
        raise PeerLost(
            f"{text!r} is not an address", hint='write "host:port", or "[v6]:port" for IPv6'
        )
    return host, int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class TcpConnection:
    """A `Connection` over a connected socket, which it owns."""

    @classmethod
    def over(cls, connected: socket.socket, peer: str, options: SocketOptions) -> TcpConnection:
        """Sets the socket up, or closes it. Raises OSError where the peer is gone already."""
        try:
            connected.setblocking(True)
            options.connected(connected)
        except OSError:
            connected.close()
            raise
        return cls(connected, peer)

    def __init__(self, connected: socket.socket, peer: str) -> None:
        self.peer = peer
        self._socket = connected

    def send(self, parts: Sequence[memoryview]) -> int:
        try:
            return self._socket.sendmsg(parts)
        except OSError as error:
            raise self._lost(error) from error

    def send_now(self, frame: bytes) -> bool:
        try:
            sent = self._socket.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost(error) from error
        if sent == len(frame):
            return True
        self.unblock()
        raise PeerLost(f"the connection to {self.peer} is stuck")

    def recv_into(self, view: memoryview) -> int:
        try:
            return self._socket.recv_into(view)
        except OSError as error:
            raise self._lost(error) from error

    def quiet(self) -> bool:
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def unblock(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()

    def _lost(self, error: OSError) -> PeerLost:
        return PeerLost(f"the connection to {self.peer} broke: {_reason(error)}")


class TcpListener:
    def __init__(self, listening: socket.socket, options: SocketOptions) -> None:
        listening.setblocking(False)
        self._options = options
        self._socket = listening
        self.port: int = listening.getsockname()[1]
        self._wake, self._woken = socket.socketpair()

    def accept(self) -> TcpConnection | None:
        while True:
            try:
                readable, _, _ = select.select([self._socket, self._woken], [], [])
                if self._woken in readable:
                    self._free()
                    return None
                connected, address = self._socket.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                raise PeerLost(f"port {self.port} accepts nobody: {_reason(error)}") from error
            where = format_address(address[0], address[1])
            try:
                return TcpConnection.over(connected, where, self._options)
            except OSError as error:
                # that peer is gone already: no reason to keep others waiting
                log.debug("a connection from %s broke: %s", where, _reason(error))

    def close(self) -> None:
        try:
            self._wake.send(b"x")
        except OSError:
            return

    def _free(self) -> None:
        for each in (self._socket, self._wake, self._woken):
            each.close()


class TcpTransport:
    def __init__(self, options: SocketOptions | None = None) -> None:
        self._options = options or SocketOptions()

    def listen(self, address: tuple[str, int]) -> TcpListener:
        host, port = address
        try:
            family, kind, protocol, _, where = _resolve(host, port, socket.AI_PASSIVE)
            listening = socket.socket(family, kind, protocol)
            try:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind(where)
                self._options.listening(listening)
                listening.listen(BACKLOG)
            except OSError:
                listening.close()
                raise
        except OSError as error:
            where_text = format_address(host, port)
            raise PeerLost(f"can't listen on {where_text}: {_reason(error)}") from error
        return TcpListener(listening, self._options)

    def dial(self, address: tuple[str, int], timeout_s: float) -> TcpConnection:
        where = format_address(*address)
        try:
            connected = socket.create_connection(address, timeout=timeout_s)
            return TcpConnection.over(connected, where, self._options)
        except OSError as error:
            raise PeerLost(f"can't reach {where}: {_reason(error)}") from error


def _resolve(host: str, port: int, flags: int) -> tuple[int, int, int, str, tuple[object, ...]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    family, kind, protocol, name, where = found[0]
    return family, kind, protocol, name, tuple(where)


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
