"""Notices clients that hang up, while their request is computed. One thread for all of them."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue


class DisconnectWatch:
    """`watching` from any thread; a client that shuts down its sending side counts as gone.

    mlx_lm.server's own handler notices a vanished client at its next write, which a request
    that is not streamed makes at its end.
    """

    def __init__(self) -> None:
        self._changes: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        threading.Thread(target=self._run, name="disconnects", daemon=True).start()

    @contextlib.contextmanager
    def watching(self, client: socket.socket, gone: Callable[[], None]) -> Iterator[None]:
        """Calls `gone`, at most once and on the watch's thread, if the client hangs up."""
        # a duplicate: the number stays ours until the watch has let it go
        watched = client.dup()
        self._change(lambda: self._selector.register(watched, selectors.EVENT_READ, gone))
        try:
            yield
        finally:
            self._change(lambda: self._forget(watched))

    def _change(self, change: Callable[[], object]) -> None:
        self._changes.put(change)
        self._wake_write.send(b"\0")

    def _forget(self, watched: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(watched)
        watched.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._apply_changes()
                elif isinstance(key.fileobj, socket.socket):
                    self._look(key.fileobj, key.data)

    def _apply_changes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)
        while True:
            try:
                self._changes.get_nowait()()
            except Empty:
                return

    def _look(self, client: socket.socket, gone: Callable[[], None]) -> None:
        # forgotten by a change that came with the same wake-up
        if client.fileno() < 0:
            return
        try:
            ended = client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return
        except OSError:
            ended = True
        # bytes past the request (a pipelined one) would wake this for ever: stop looking
        with contextlib.suppress(KeyError):
            self._selector.unregister(client)
        if ended:
            gone()
