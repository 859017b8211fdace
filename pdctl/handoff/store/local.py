"""Serves one host's replicas: a thread per connection, none of which trusts what comes."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from typing import Protocol

import msgspec

from pdctl.handoff.store import frames
from pdctl.handoff.store.shelves import Shelves
from pdctl.trace import monotonic_s

log = logging.getLogger("pdctl.store")

MAX_CONNECTIONS = 512
ACCEPT_AGAIN_S = 1.0
BROKEN = (OSError, msgspec.DecodeError)


class Elsewhere(Protocol):
    """Other hosts' stores."""

    def bring(self, keys: tuple[bytes, ...], parent: bytes | None, until_s: float) -> bool:
        """Gets leading pages that another store holds onto the shelves, as many as arrive by
        then; whether any are there or under way. Never raises."""
        ...

    def bring_one(self, keys: tuple[bytes, ...], parent: bytes | None, until_s: float) -> bool:
        """The same for the first of these that another store holds."""
        ...


class Client:
    """One replica's process, for as long as its anchor is connected."""

    def __init__(self) -> None:
        self.gone = False


class LocalServer:
    """`start`, then `close`.

    Args:
        contract: its digest; a replica of another one is refused.
    """

    def __init__(
        self, path: str, shelves: Shelves, contract: str, elsewhere: Elsewhere | None = None
    ) -> None:
        self._path = path
        self._shelves = shelves
        self._contract = contract
        self._elsewhere = elsewhere
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._clients: dict[bytes, Client] = {}
        self._connections: set[socket.socket] = set()
        self._wake, self._woken = socket.socketpair()
        self._listening: socket.socket | None = None
        self._thread = threading.Thread(target=self._accept, name="pdctl-store", daemon=True)

    def start(self) -> None:
        """Raises OSError where it can't listen there."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            listening.bind(self._path)
            os.chmod(self._path, 0o600)
            listening.listen(64)
        except OSError:
            listening.close()
            raise
        self._listening = listening
        self._thread.start()

    def idle(self, timeout_s: float, clients: int = 0) -> bool:
        """Waits until no more than that many clients are there; False where not in time."""
        with self._left:
            return self._left.wait_for(lambda: len(self._clients) <= clients, timeout_s)

    def close(self) -> None:
        """Bounded: every connection ends. Any number of times."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        with self._lock:
            connections = tuple(self._connections)
        for connection in connections:
            _shut(connection)
        if self._thread.ident is not None:
            self._thread.join(frames.FRAME_S)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def _accept(self) -> None:
        assert self._listening is not None
        with self._listening, self._wake, self._woken:
            while True:
                readable, _, _ = select.select([self._listening, self._woken], [], [])
                if self._woken in readable:
                    return
                try:
                    connection, _ = self._listening.accept()
                except OSError as error:
                    # too many open files, say: whoever is connected is served on
                    log.warning("no connection can be taken: %s", error)
                    select.select([self._woken], [], [], ACCEPT_AGAIN_S)
                else:
                    self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._connections) >= MAX_CONNECTIONS:
                connection.close()
                return
            self._connections.add(connection)
        name = "pdctl-store-replica"
        threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._talk(connection)
        except BROKEN as error:
            log.debug("a connection ended: %r", error)
        # one replica's message must never end the store
        except Exception:
            log.exception("a connection was dropped")
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _talk(self, connection: socket.socket) -> None:
        entered = frames.read_request(connection)
        if not isinstance(entered, frames.Enter):
            raise ConnectionError("Enter comes first")
        refusal = self._refusal(entered)
        if refusal is not None:
            connection.sendall(frames.encode(frames.Refused(reason=refusal)))
            return
        answer = frames.encode(frames.Entered(slots=self._shelves.slots))
        if entered.anchor:
            self._anchor(connection, entered, answer)
            return
        client = self._clients[entered.client]
        connection.sendall(answer)
        lent: int | None = None
        try:
            while True:
                request = frames.read_request(connection)
                reply = self._answer(client, request)
                lent = _new_lease(request, reply)
                connection.sendall(frames.encode(reply))
        finally:
            if lent is not None:
                # a client ends a connection only where an answer came too late for it
                self._shelves.give_back(client, lent)
            if client.gone:
                # of a call that was under way when its anchor ended
                self._shelves.leave(client)

    def _refusal(self, entered: frames.Enter) -> str | None:
        if entered.contract != self._contract:
            return f"this store holds pages of the contract {self._contract[:12]}"
        if entered.page_bytes != self._shelves.geometry.page_bytes:
            return f"this store's pages are of {self._shelves.geometry.page_bytes} bytes"
        if entered.anchor == (entered.client in self._clients):
            return "a client has one anchor, and that comes first"
        return None

    def _anchor(self, connection: socket.socket, entered: frames.Enter, answer: bytes) -> None:
        """For as long as the client lives."""
        client, name = Client(), entered.client
        self._shelves.keep_ahead()
        with self._lock:
            self._clients[name] = client
        try:
            socket.send_fds(connection, [answer], [self._shelves.descriptor])
            frames.read_request(connection)
        finally:
            client.gone = True
            self._shelves.leave(client)
            with self._left:
                del self._clients[name]
                self._left.notify_all()

    # -- requests

    def _answer(self, client: Client, request: frames.Request) -> frames.Reply:
        shelves = self._shelves
        if isinstance(request, frames.Hold):
            return self._hold(client, request)
        if isinstance(request, frames.Tail):
            return self._tail(client, request)
        if isinstance(request, frames.Release):
            return frames.Answered(ok=shelves.give_back(client, request.lease))
        if isinstance(request, frames.Held):
            return frames.Counted(pages=shelves.held(request.keys))
        if isinstance(request, frames.Reserve):
            granted = shelves.reserve(client, request.keys, request.parent)
            if granted is None:
                return frames.Answered(ok=False)
            return frames.Granted(
                lease=granted.lease, wanted=granted.wanted, evicted=granted.evicted
            )
        if isinstance(request, frames.Commit):
            written = shelves.commit(client, request.lease, request.keys)
            return frames.Answered(ok=shelves.give_back(client, request.lease) and written)
        raise ConnectionError("a second Enter")

    def _hold(self, client: Client, request: frames.Hold) -> frames.Reply:
        until_s = monotonic_s() + request.timeout_s
        keys = request.keys
        lent = self._shelves.hold(client, keys, until_s, request.lease)
        if lent is None:
            return frames.Answered(ok=False)
        slots, count = lent.slots, len(lent.slots)
        if request.others and self._elsewhere is not None and count < len(keys):
            parent = keys[count - 1] if count else request.parent
            self._elsewhere.bring(keys[count:], parent, until_s)
            more = self._shelves.hold(client, keys[count:], until_s, lent.lease)
            slots += more.slots if more is not None else ()
        return frames.Lent(lease=lent.lease, slots=slots, backed=self._shelves.backed)

    def _tail(self, client: Client, request: frames.Tail) -> frames.Reply:
        """Others are asked only where the page before it came from one of them."""
        until_s = monotonic_s() + request.timeout_s
        keys, before = request.keys, request.parent
        place = self._shelves.first(keys, awaited=True)
        if place is None and before is not None and self._shelves.brought(before):
            assert self._elsewhere is not None, "somebody brought it"
            self._elsewhere.bring_one(keys, before, until_s)
            place = self._shelves.first(keys, awaited=True)
        if place is None:
            return frames.Lent(lease=request.lease, slots=())
        lent = self._shelves.hold(client, keys[place : place + 1], until_s, request.lease)
        return frames.Lent(lease=request.lease, slots=lent.slots if lent else (), place=place)


def _new_lease(request: frames.Request, reply: frames.Reply) -> int | None:
    if isinstance(reply, frames.Granted):
        return reply.lease
    fresh = isinstance(request, frames.Hold) and request.lease is None
    return reply.lease if fresh and isinstance(reply, frames.Lent) else None


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
