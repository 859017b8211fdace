"""A UNIX socket's stream whose reader may be cancelled at any moment."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketStream


class UnixStream(ByteStream):
    """As anyio's, but for how it waits: a reader that is cancelled in the turn in which a byte
    comes would have the loop report an error of nobody's there (its future's result is set once
    it is over). One reader; `aclose`, by any task, ends its `receive` with ClosedResourceError.
    """

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self._socket: socket.socket = stream.extra(SocketAttribute.raw_socket)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if self._socket.fileno() >= 0:
            await anyio.wait_readable(self._socket)
        return await self._stream.receive(max_bytes)

    async def send(self, item: bytes) -> None:
        await self._stream.send(item)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        if self._socket.fileno() >= 0:
            anyio.notify_closing(self._socket)
        await self._stream.aclose()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return self._stream.extra_attributes
