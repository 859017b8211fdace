"""Serves other hosts' stores over the data plane: whoever proves the cluster's key may ask which
pages are held, and for them. A thread per connection."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from pdctl.errors import HandoffError, ProtocolViolation
from pdctl.handoff import wire
from pdctl.handoff.accepting import accept_each
from pdctl.handoff.handshake import challenge
from pdctl.handoff.link import Link
from pdctl.handoff.store.shelves import Shelves
from pdctl.handoff.transport.interface import Connection, Listener, Transport
from pdctl.trace import monotonic_s

log = logging.getLogger("pdctl.store")

HANDSHAKE_S = 5.0
IDLE_S = 60.0
PAGE_S = 10.0
"""For one answer, or one page, to be taken by the peer."""
MAX_CONNECTIONS = 64


@contextmanager
def within(connection: Connection, seconds: float) -> Iterator[None]:
    """Ends the connection where the block takes longer: whoever is inside gets PeerLost."""
    timer = threading.Timer(max(0.0, seconds), connection.unblock)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class RemoteServer:
    """`start`, then `close`.

    Args:
        key: the cluster's.
    """

    def __init__(self, key: bytes, shelves: Shelves, transport: Transport) -> None:
        self._key = key
        self._shelves = shelves
        self._transport = transport
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._closing = threading.Event()
        self._listener: Listener | None = None

    def start(self, address: tuple[str, int]) -> int:
        """The port. Raises PeerLost where it can't listen there."""
        self._listener = self._transport.listen(address)
        threading.Thread(target=self._accept, name="pdctl-stores", daemon=True).start()
        return self._listener.port

    def close(self) -> None:
        """Any number of times."""
        self._closing.set()
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            connections = tuple(self._connections)
        for connection in connections:
            connection.unblock()

    def _accept(self) -> None:
        assert self._listener is not None
        accept_each(self._listener, self._closing, self._welcome)

    def _welcome(self, connection: Connection) -> None:
        with self._lock:
            full = len(self._connections) >= MAX_CONNECTIONS or self._closing.is_set()
            if not full:
                self._connections.add(connection)
        if full:
            connection.unblock()
            connection.close()
            return
        name = f"pdctl-stores-{connection.peer}"
        threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        link = Link(connection, self._shelves.geometry, monotonic_s)
        try:
            with within(connection, HANDSHAKE_S):
                challenge(link, self._key)
            while True:
                with within(connection, IDLE_S):
                    header = link.read_header()
                with within(connection, PAGE_S):
                    message = link.read_message(header)
                if not isinstance(message, wire.Ask):
                    raise ProtocolViolation(f"the peer sent {header.kind.name} to a page store")
                self._answer(link, message)
        except HandoffError as error:
            log.debug("a store's connection from %s ended: %s", connection.peer, error)
        # one peer must never end the store
        except Exception:
            log.exception("a store's connection from %s was dropped", connection.peer)
        finally:
            connection.unblock()
            connection.close()
            self._shelves.leave(link)
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, link: Link, ask: wire.Ask) -> None:
        if ask.pages:
            self._send(link, ask.keys)
            return
        if ask.any:
            place = self._shelves.first(ask.keys)
            count = 0 if place is None else place + 1
        else:
            count = self._shelves.held(ask.keys)
        with within(link.connection, PAGE_S):
            link.send(wire.Counted(count=count))

    def _send(self, link: Link, keys: tuple[bytes, ...]) -> None:
        lent = self._shelves.hold(link, keys, 0.0)
        assert lent is not None, "a new lease"
        for at, slot in enumerate(lent.slots):
            page = self._shelves.page(slot).view(np.uint8).reshape(-1)
            with within(link.connection, PAGE_S):
                link.send_piece(0, at, 0, page.data)
        # all is on its way before the peer is told so: who has been told finds it counted
        self._shelves.give_back(link, lent.lease)
        self._shelves.count(sent_pages=len(lent.slots))
        with within(link.connection, PAGE_S):
            link.send(wire.End(pages=len(lent.slots), first_token=None))
