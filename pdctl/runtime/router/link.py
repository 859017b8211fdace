"""The agent's Unix socket, from the router's end (`pdctl.engines.channel`).

The link outlives the agent: it dials again with a growing pause, and the router serves with
its last picture meanwhile.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable

import anyio
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from pdctl import __version__
from pdctl.engines.channel import (
    MAX_FRAME_BYTES,
    Attach,
    Members,
    Message,
    PairStates,
    Poll,
    Refresh,
    Refused,
    RouterAssignment,
    RouterReport,
    ToRouter,
    encode,
)
from pdctl.errors import LaunchError
from pdctl.runtime.machine.unix import UnixStream

log = logging.getLogger("pdctl.router")

REFRESH_TIMEOUT_S = 2.0
PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)
SEND_TIMEOUT_S = 5.0

_decoder = msgspec.msgpack.Decoder(ToRouter)


class AgentLink:
    """One connection at a time to the agent.

    Args:
        path: of the socket.
        on_members: called with every picture, in the event loop; it must not wait.
        report: the answer to a Poll of that seq.
    """

    def __init__(
        self,
        path: str,
        *,
        on_members: Callable[[Members], None],
        report: Callable[[int], RouterReport],
    ) -> None:
        self.on_assignment: Callable[[RouterAssignment], None] = lambda assignment: None
        """Called with every assignment after the first, in the event loop; must not wait."""
        self._path = path
        self._on_members = on_members
        self._report = report
        self._stream: UnixStream | None = None
        self._sending = anyio.Lock()
        self._states: PairStates | None = None
        self._assignment: RouterAssignment | None = None
        self._seqs = itertools.count(1)
        self._refreshes: dict[int, anyio.Event] = {}
        self._received: BufferedByteReceiveStream | None = None

    async def attach(self) -> RouterAssignment:
        """Dials once and returns the assignment.

        Raises:
            LaunchError: nobody listens, or the agent refuses.
        """
        try:
            stream = UnixStream(await anyio.connect_unix(self._path))
        except OSError as error:
            raise LaunchError(f"the agent's socket cannot be opened: {error}") from None
        self._received = BufferedByteReceiveStream(stream)
        try:
            await stream.send(
                encode(Attach(kind="router", name="router", pid=os.getpid(), version=__version__))
            )
            first = await self._receive()
        except (OSError, anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
            await stream.aclose()
            raise LaunchError("the agent closed its socket before an assignment") from None
        if not isinstance(first, RouterAssignment):
            await stream.aclose()
            reason = first.reason if isinstance(first, Refused) else "no assignment came first"
            raise LaunchError(f"the agent refuses this router: {reason}")
        self._stream = stream
        return first

    async def run(self, assignment: RouterAssignment) -> None:
        """Reads until the agent goes, dials again, and so on; ends by cancellation, or by
        LaunchError when another run's agent answers."""
        pauses = iter(PAUSES_S)
        while True:
            if self._stream is not None:
                await self._resend()
                await self._read_all()
                pauses = iter(PAUSES_S)
                log.warning("the agent went away; serving with the last picture")
            await anyio.sleep(next(pauses, PAUSES_S[-1]))
            try:
                again = await self.attach()
            except LaunchError as error:
                log.debug("%s", error.message)
                continue
            if again.run != assignment.run:
                raise LaunchError("the agent's socket belongs to another run")
            self.on_assignment(again)

    async def tell(self, states: PairStates) -> None:
        """Sends the newest states; kept and sent again to the next agent when there is none."""
        if states != self._states:
            self._states = states
            await self._send(states)

    async def refresh(self) -> bool:
        """Asks for fresh counters and waits until they are in the roster, bounded; False
        when they did not come."""
        seq = next(self._seqs)
        arrived = self._refreshes[seq] = anyio.Event()
        try:
            if not await self._send(Refresh(seq=seq)):
                return False
            with anyio.move_on_after(REFRESH_TIMEOUT_S):
                await arrived.wait()
            return arrived.is_set()
        finally:
            del self._refreshes[seq]

    async def _resend(self) -> None:
        if self._states is not None:
            await self._send(self._states)

    async def _read_all(self) -> None:
        try:
            while True:
                await self._handle(await self._receive())
        except (
            OSError,
            anyio.EndOfStream,
            anyio.IncompleteRead,
            anyio.BrokenResourceError,
            anyio.ClosedResourceError,
            msgspec.DecodeError,
        ) as error:
            log.debug("agent link: %r", error)
        finally:
            stream, self._stream = self._stream, None
            if stream is not None:
                with anyio.CancelScope(shield=True), anyio.move_on_after(1.0):
                    await stream.aclose()

    async def _handle(self, message: ToRouter) -> None:
        if isinstance(message, Members):
            self._on_members(message)
            arrived = self._refreshes.get(message.seq)
            if arrived is not None:
                arrived.set()
        elif isinstance(message, RouterAssignment):
            self.on_assignment(message)
        elif isinstance(message, Poll):
            await self._send(self._report(message.seq))

    async def _receive(self) -> ToRouter:
        assert self._received is not None, "attach() comes first"
        length = int.from_bytes(await self._received.receive_exactly(4), "little")
        if length > MAX_FRAME_BYTES:
            raise msgspec.DecodeError(f"a frame of {length} bytes")
        return _decoder.decode(await self._received.receive_exactly(length))

    async def _send(self, message: Message) -> bool:
        """False when there is no agent now, or it does not read."""
        async with self._sending:
            stream = self._stream
            if stream is None:
                return False
            try:
                with anyio.move_on_after(SEND_TIMEOUT_S) as patience:
                    await stream.send(encode(message))
            except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return False
            if patience.cancelled_caught:
                await stream.aclose()
            return not patience.cancelled_caught
