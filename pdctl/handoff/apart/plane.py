"""The process that a replica's data plane runs in, as the engine's process sees it.

An engine's interpreter is busy: a thread that wants it back after a system call waits up to 5 ms
each time, and a handoff makes hundreds of them. So sockets, checksums and the protocol live in
an interpreter of their own, and only what concerns the engine crosses between the two.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

from pdctl.errors import HandoffError, PeerLost
from pdctl.handoff.apart.board import Mirror
from pdctl.handoff.apart.calls import Call, Close, Failed, News, Open, Opened, Piece, Ping, Pong
from pdctl.handoff.apart.pipe import Gone, Pipe
from pdctl.handoff.apart.shared import SharedMemory
from pdctl.handoff.arena import Bytes
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.ending import OnFailed
from pdctl.handoff.opening import Opening
from pdctl.handoff.pulse import guarded

log = logging.getLogger("pdctl.handoff")

OPEN_S = 120.0
"""For the process to start, on a host that loads models meanwhile."""
CLOSE_S = 12.0
"""More than either end takes to close."""


class ApartCommon(TypedDict):
    """Arguments of either end that is apart.

    lock        prepares shared memory for an engine's copies, once; None: any will do
    board       counts what the data plane counts
    on_failed   as `ending.Common` says
    on_lost     called once, last, when the process has ended without being asked to
    """

    lock: Callable[[Bytes], None] | None
    board: CounterBoard
    on_failed: OnFailed
    on_lost: Callable[[HandoffError], None]


class Plane:
    """Threads: one that hears. Any thread may call any method; none waits for the network.

    Args:
        opening: which end it is to be.
        memory: shared; owned by this from here on.
        heard: told of everything, on the hearing thread; it must not block.
        lost: ends the open handoffs with that error; how many there were.
        common: as `ApartCommon` says; `lock` is the caller's to use.
    """

    def __init__(
        self,
        opening: Opening,
        memory: SharedMemory,
        *,
        heard: Callable[[Call], None],
        lost: Callable[[HandoffError], int],
        **common: Unpack[ApartCommon],
    ) -> None:
        self.memory = memory
        self.error: HandoffError | None = None
        """Why it is lost, or closed."""
        self._heard = heard
        self._lost = lost
        self._on_failed = common["on_failed"]
        self._on_lost = common["on_lost"]
        self._mirror = Mirror(common["board"])
        self._opened: Opened | None = None
        self._answered = threading.Event()
        self._closing = threading.Event()
        ours, theirs = socket.socketpair()
        try:
            self._process = _started(theirs.fileno(), memory)
        except BaseException:
            ours.close()
            memory.close()
            raise
        finally:
            theirs.close()
        self._pipe: Pipe[Any] = Pipe(ours, News)
        self._thread = threading.Thread(target=self._hear, name="pdctl-plane", daemon=True)
        self._thread.start()
        self.say(Open(opening))

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_open(self) -> int | None:
        """The port that listens, or None where it dials.

        Raises:
            PeerLost: it can't listen there, or the process did not start.
        """
        self._answered.wait(OPEN_S)
        if self._opened is None:
            raise PeerLost("the data plane's process did not start")
        if self._opened.trouble is not None:
            raise self._opened.trouble.error()
        return self._opened.port

    def say(self, call: Call) -> None:
        """Nothing where it is lost: whoever has an open handoff is told by `lost`."""
        with contextlib.suppress(Gone):
            self._pipe.say([call])

    def say_unless_busy(self, call: Call) -> bool:
        """As `say`; False where anybody is saying something."""
        try:
            return self._pipe.say_unless_busy([call])
        except Gone:
            return True

    def close(self) -> None:
        """Ends every handoff as cancelled, and the process; bounded."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.say(Close())
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            log.warning("the data plane's process does not end; it is killed")
            self._process.kill()
            self._process.wait()
        self._thread.join(CLOSE_S)

    # -- the hearing thread

    def _hear(self) -> None:
        try:
            while True:
                for call in self._pipe.hear():
                    self._take(call)
        except Gone as gone:
            self._gone(gone)
        finally:
            self._pipe.close()
            self.memory.close()

    def _take(self, call: Call) -> None:
        if isinstance(call, Piece):
            self._heard(call)
        elif isinstance(call, Opened):
            self._opened = call
            self._answered.set()
        elif isinstance(call, Ping):
            self.say(Pong())
        elif isinstance(call, Failed):
            guarded(lambda: self._on_failed(call.room, call.cause, call.detail))
        else:
            self._mirror.told(call)
            guarded(lambda: self._heard(call))

    def _gone(self, gone: Gone) -> None:
        asked = self._closing.is_set() or (self._opened is not None and self._opened.trouble)
        if not asked:
            self._process.kill()
        status = self._process.wait()
        if asked:
            said = "the data plane is closed"
        else:
            said = f"the data plane's process ended: {_ending(status)} ({gone})"
            log.error("%s", said)
        error = HandoffError(said)
        self.error = error
        self._answered.set()
        failed = self._lost(error)
        self._mirror.lost(failed, error.cause)
        if not asked:
            guarded(lambda: self._on_lost(error))


def _started(connected: int, memory: SharedMemory) -> subprocess.Popen[bytes]:
    numbers = (connected, memory.descriptor, memory.size)
    return subprocess.Popen(
        [sys.executable, "-m", "pdctl.handoff.apart", *(str(each) for each in numbers)],
        pass_fds=(connected, memory.descriptor),
        stdin=subprocess.DEVNULL,
        # it imports what this process has imported
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def _ending(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"
