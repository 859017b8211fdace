"""Other hosts' stores, as this host's asks them: which pages they have, and for those pages.

A store that does not answer is left alone for a while; what it has is a miss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from pdctl.errors import HandoffError, PeerLost, ProtocolViolation
from pdctl.handoff import wire
from pdctl.handoff.handshake import answer
from pdctl.handoff.idle import Address, IdleLinks
from pdctl.handoff.link import Link
from pdctl.handoff.store.remote import within
from pdctl.handoff.store.shelves import Granted, Shelves
from pdctl.handoff.transport.interface import Transport
from pdctl.trace import monotonic_s

log = logging.getLogger("pdctl.store")

DIAL_S = 1.0
ASK_S = 0.5
"""For one store to say what it has: a prompt waits for all of them."""
AWAY_S = 5.0
"""For how long a store that did not answer is not asked."""

Result = TypeVar("Result")


class Others:
    """As `local.Elsewhere`. Thread-safe; nothing is brought twice, since what is on its way is
    reserved on the shelves.

    Args:
        addresses: host → where its store is dialled.
    """

    def __init__(
        self,
        key: bytes,
        shelves: Shelves,
        *,
        addresses: Mapping[str, Address],
        transport: Transport,
    ) -> None:
        self._key = key
        self._shelves = shelves
        self._addresses = dict(addresses)
        self._transport = transport
        self._idle = IdleLinks(monotonic_s)
        self._away: dict[str, float] = {}

    def bring(self, keys: tuple[bytes, ...], parent: bytes | None, until_s: float) -> bool:
        best, count = "", 0
        for host in self._there():
            has = self._count(host, keys, until_s)
            if has > count:
                best, count = host, has
            if count == len(keys):
                break
        return self._fetch(best, keys[:count], parent, until_s)

    def bring_one(self, keys: tuple[bytes, ...], parent: bytes | None, until_s: float) -> bool:
        for host in self._there():
            ask = wire.Ask(keys=keys[: wire.MAX_ASKED], any=True)
            place = self._talk(host, until_s, partial(_counted, ask)) or 0
            if 0 < place <= len(ask.keys):
                return self._fetch(host, keys[place - 1 : place], parent, until_s)
        return False

    def close(self) -> None:
        self._idle.close()

    def _there(self) -> Iterator[str]:
        now = monotonic_s()
        self._idle.expire(now)
        for host in self._addresses:
            if self._away.get(host, now) <= now:
                yield host

    def _count(self, host: str, keys: tuple[bytes, ...], until_s: float) -> int:
        found = 0
        for batch in _batches(keys):
            ask = wire.Ask(keys=batch)
            has = self._talk(host, until_s, partial(_counted, ask)) or 0
            found += min(has, len(batch))
            if has < len(batch):
                break
        return found

    def _fetch(
        self, host: str, keys: tuple[bytes, ...], parent: bytes | None, until_s: float
    ) -> bool:
        granted = self._shelves.reserve(self, keys, parent) if keys else None
        if granted is None:
            return False
        try:
            if not granted.wanted:
                return True
            got = self._talk(host, until_s, lambda link: self._take(link, keys, granted), last=True)
            return bool(got)
        finally:
            self._shelves.give_back(self, granted.lease)

    def _take(self, link: Link, keys: Sequence[bytes], granted: Granted) -> int:
        """Pages into the slots that were reserved, each held as soon as it is there."""
        got, wanted = 0, granted.wanted
        for batch in _batches(tuple(keys[each.place] for each in wanted)):
            link.send(wire.Ask(keys=batch, pages=True))
            for at, key in enumerate(batch):
                header = link.read_header()
                if header.kind is wire.Kind.END:
                    link.read_message(header)
                    return got
                whole = header.layers == link.geometry.layers
                if header.kind is not wire.Kind.PAGES or header.page != at or not whole:
                    raise ProtocolViolation(f"a page store sent {header.kind.name} out of order")
                raw = link.read_piece(header)
                page = self._shelves.page(wanted[got].slot, writable=True)
                page.view(np.uint8).reshape(-1)[:] = np.frombuffer(raw, np.uint8)
                if not self._shelves.commit(self, granted.lease, (key,), brought=True):
                    raise HandoffError("the reservation is gone")
                got += 1
            header = link.read_header()
            if header.kind is not wire.Kind.END:
                raise ProtocolViolation("a page store sent more pages than were asked for")
            link.read_message(header)
        return got

    def _talk(
        self, host: str, until_s: float, call: Callable[[Link], Result], *, last: bool = False
    ) -> Result | None:
        """One exchange; None where it failed. A connection that had gone stale is dialled anew.

        Args:
            last: may take all of the time that is left.
        """
        address = self._addresses[host]
        link = self._idle.take(address)
        while True:
            reused = link is not None
            left_s = until_s - monotonic_s()
            try:
                link = link or self._dial(address, left_s)
                with within(link.connection, left_s if last else min(left_s, ASK_S)):
                    found = call(link)
                self._idle.put(address, link)
                return found
            except HandoffError as error:
                if link is not None:
                    link.connection.unblock()
                    link.connection.close()
                if not (reused and isinstance(error, PeerLost)):
                    log.info("host=%s its page store is left alone: %s", host, error)
                    self._away[host] = monotonic_s() + AWAY_S
                    return None
                link = None

    def _dial(self, address: Address, left_s: float) -> Link:
        limit_s = min(DIAL_S, max(0.05, left_s))
        connection = self._transport.dial(address, limit_s)
        link = Link(connection, self._shelves.geometry, monotonic_s)
        try:
            with within(connection, limit_s):
                answer(link, self._key)
        except HandoffError:
            connection.unblock()
            connection.close()
            raise
        return link


def _counted(ask: wire.Ask, link: Link) -> int:
    link.send(ask)
    message = link.read_message(link.read_header())
    if not isinstance(message, wire.Counted):
        raise ProtocolViolation(f"a page store answered with {type(message).__name__}")
    return message.count


def _batches(keys: tuple[bytes, ...]) -> Iterator[tuple[bytes, ...]]:
    """What fits into one frame each (R47)."""
    for at in range(0, len(keys), wire.MAX_ASKED):
        yield keys[at : at + wire.MAX_ASKED]
