from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from pdctl.runtime.machine.unix import UnixStream

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[tuple[UnixStream, socket.socket]]:
    """A stream, and the socket at its other end."""
    path = str(folder / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        stream = UnixStream(await anyio.connect_unix(path))
        peer, _ = server.accept()
        with peer:
            yield stream, peer
            await stream.aclose()


async def test_a_reader_that_is_cancelled_when_a_byte_comes_harms_nobody(tmp_path: Path) -> None:
    """R17: nothing is reported to the loop, and the byte is the next reader's."""
    async with connected(tmp_path) as (stream, peer):
        reader = asyncio.ensure_future(stream.receive())
        await anyio.wait_all_tasks_blocked()
        peer.send(b"x")
        # before the loop comes to the byte, in the turn in which it finds it
        asyncio.get_running_loop().call_soon(reader.cancel)
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await stream.receive() == b"x"


async def test_closing_ends_a_reader_that_waits(tmp_path: Path) -> None:
    """And any later one."""
    async with connected(tmp_path) as (stream, _):
        reader = asyncio.ensure_future(stream.receive())
        await anyio.wait_all_tasks_blocked()
        await stream.aclose()
        for late in (reader, stream.receive()):
            with pytest.raises(anyio.ClosedResourceError):
                await late


async def test_bytes_go_both_ways_to_the_end(tmp_path: Path) -> None:
    async with connected(tmp_path) as (stream, peer):
        await stream.send(b"there")
        assert peer.recv(9) == b"there"
        peer.send(b"back")
        peer.shutdown(socket.SHUT_WR)
        assert await stream.receive() == b"back"
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()
        await stream.send_eof()
        assert peer.recv(1) == b""
