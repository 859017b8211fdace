"""The agent's end of `pdctl.engines.channel`: one Unix socket, 0600, in a folder 0700.

A frame that can't be decoded, a message out of order, or a peer that does not read ends that
connection and nothing else; engines and router dial again.
"""

from __future__ import annotations

import itertools
import logging
import socket
import struct
import sys
from collections.abc import Callable
from typing import Protocol

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from pdctl.engines.channel import (
    MAX_FRAME_BYTES,
    Assignment,
    Attach,
    Failed,
    Members,
    Message,
    PairStates,
    Poll,
    Ready,
    Refresh,
    Refused,
    Report,
    RouterAssignment,
    RouterReport,
    StoreAssignment,
    StoreReady,
    StoreReport,
    ToAgent,
    encode,
)
from pdctl.runtime.machine.unix import UnixStream

log = logging.getLogger("pdctl.agent")

ATTACH_S = 5.0
"""From connecting to a whole Attach."""
SEND_S = 5.0
POLL_S = 1.0
MAX_REFRESHES = 64
"""At one time; more are dropped, and the router's own deadline ends its wait."""

BROKEN = (
    OSError,
    anyio.EndOfStream,
    anyio.IncompleteRead,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.DelimiterNotFound,
    msgspec.DecodeError,
)

Assigned = Assignment | RouterAssignment | StoreAssignment

_decoder: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)


class Link:
    """One attached process; `poll` may be called by any task, `receive` by its reader only."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self._stream = UnixStream(stream)
        self._received = BufferedByteReceiveStream(self._stream)
        self._sending = anyio.Lock()
        self._seqs = itertools.count(1)
        self._answers: dict[int, anyio.Event] = {}
        self.answer: Report | RouterReport | StoreReport | None = None
        """The latest."""

    @property
    def peer(self) -> tuple[int | None, int | None]:
        """(uid, pid) of the process at the other end, as far as the kernel tells."""
        raw: socket.socket = self._stream.extra(anyio.abc.SocketAttribute.raw_socket)
        if sys.platform == "linux":
            found = raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, uid, _ = struct.unpack("3i", found)
            return uid, pid
        if sys.platform == "darwin":
            level, local_peercred, local_peerpid = 0, 1, 2
            found = raw.getsockopt(level, local_peercred, 128)
            uid = struct.unpack_from("II", found)[1]
            return uid, raw.getsockopt(level, local_peerpid)
        return None, None

    async def receive(self) -> ToAgent:
        length = int.from_bytes(await self._received.receive_exactly(4), "little")
        if length > MAX_FRAME_BYTES:
            raise msgspec.DecodeError(f"a frame of {length} bytes")
        return _decoder.decode(await self._received.receive_exactly(length))

    async def send(self, message: Message) -> bool:
        """False when it did not go out within `SEND_S`; the connection is then closed."""
        with anyio.move_on_after(SEND_S):
            async with self._sending:
                try:
                    await self._stream.send(encode(message))
                except BROKEN:
                    return False
                return True
        await self.close()
        return False

    async def poll(self) -> bool:
        """Asks for counters and waits, at most `POLL_S`; False when none came."""
        seq = next(self._seqs)
        arrived = self._answers[seq] = anyio.Event()
        try:
            with anyio.move_on_after(POLL_S):
                if await self.send(Poll(seq=seq)):
                    await arrived.wait()
            return arrived.is_set()
        finally:
            del self._answers[seq]

    def answered(self, answer: Report | RouterReport | StoreReport) -> None:
        self.answer = answer
        arrived = self._answers.get(answer.seq)
        if arrived is not None:
            arrived.set()

    async def close(self) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(1.0):
            await self._stream.aclose()


class Keeper(Protocol):
    """What the server asks of the agent, and tells it. Nothing here waits but `refreshed`."""

    def admit(self, attach: Attach, uid: int | None, pid: int | None) -> Assigned | str:
        """A replica's, the router's or a store's assignment, or why it gets none."""
        ...

    def attached(self, name: str, link: Link) -> None: ...

    def detached(self, name: str, link: Link) -> None: ...

    def ready(self, name: str, ready: Ready | StoreReady) -> None: ...

    def failed(self, failure: Failed) -> None: ...

    def announced(self, states: PairStates) -> None: ...

    def members(self, seq: int = 0) -> Members: ...

    async def members_after(self, version: int) -> Members:
        """Waits for a picture newer than `version`."""
        ...

    async def refreshed(self, seq: int) -> Members:
        """A picture with counters of this moment; bounded."""
        ...


class ChannelServer:
    """Serves until cancelled; every connection is a task of its own."""

    def __init__(self, path: str, keeper: Keeper) -> None:
        self._path = path
        self._keeper = keeper

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        listener = await anyio.create_unix_listener(self._path, mode=0o600)
        async with listener:
            started()
            await listener.serve(self._serve)

    async def _serve(self, stream: anyio.abc.SocketStream) -> None:
        link = Link(stream)
        try:
            await self._attached(link)
        except BROKEN as error:
            log.debug("a connection ended: %r", error)
        except Exception:  # one peer's message must never end the agent
            log.exception("a connection was dropped")
        finally:
            await link.close()

    async def _attached(self, link: Link) -> None:
        first: ToAgent | None = None
        with anyio.move_on_after(ATTACH_S):
            first = await link.receive()
        if not isinstance(first, Attach):
            await link.send(Refused(reason="Attach comes first"))
            return
        is_router = first.kind == "router"
        assignment = self._keeper.admit(first, *link.peer)
        if isinstance(assignment, str):
            log.warning("replica=%s pid=%d refused: %s", first.name, first.pid, assignment)
            await link.send(Refused(reason=assignment))
            return
        self._keeper.attached(first.name, link)
        try:
            if await link.send(assignment):
                await (self._read_router(link) if is_router else self._read(first.name, link))
        finally:
            self._keeper.detached(first.name, link)

    async def _read(self, name: str, link: Link) -> None:
        while True:
            message = await link.receive()
            if isinstance(message, Ready | StoreReady):
                self._keeper.ready(name, message)
            elif isinstance(message, Failed):
                self._keeper.failed(message)
            elif isinstance(message, Report | StoreReport):
                link.answered(message)
            else:
                log.warning("replica=%s sent %s", name, type(message).__name__)
                return

    async def _read_router(self, link: Link) -> None:
        async with anyio.create_task_group() as tasks:
            refreshing: set[int] = set()
            tasks.start_soon(self._push, link)
            try:
                while True:
                    message = await link.receive()
                    if isinstance(message, PairStates):
                        self._keeper.announced(message)
                    elif isinstance(message, Refresh) and len(refreshing) < MAX_REFRESHES:
                        tasks.start_soon(self._refresh, link, message.seq, refreshing)
                    elif isinstance(message, RouterReport):
                        link.answered(message)
                    elif not isinstance(message, Refresh):
                        log.warning("the router sent %s", type(message).__name__)
                        break
            except BROKEN as error:
                log.debug("the router's connection ended: %r", error)
            tasks.cancel_scope.cancel()

    async def _push(self, link: Link) -> None:
        picture = self._keeper.members()
        while await link.send(picture):
            picture = await self._keeper.members_after(picture.version)

    async def _refresh(self, link: Link, seq: int, running: set[int]) -> None:
        running.add(seq)
        try:
            await link.send(await self._keeper.refreshed(seq))
        finally:
            running.discard(seq)
