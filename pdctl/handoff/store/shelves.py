"""What one host's store holds: index and memory under one lock, and who has borrowed what."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Sequence
from functools import partial

import msgspec

from pdctl.handoff.page import PageGeometry, Patterns
from pdctl.handoff.store import memory
from pdctl.handoff.store.index import Index, Wanted
from pdctl.trace import monotonic_s

log = logging.getLogger("pdctl.store")

AHEAD_BYTES = 256 << 20
"""What a long prompt may take at once: replicas are to have that memory prepared by then."""

Owner = object
"""Whoever's end gives back all that it had: a replica, or another host's connection."""


class StoreCounts(msgspec.Struct, frozen=True, kw_only=True):
    """One store since it started; bytes of pages."""

    pages: int = 0
    """Held now."""
    used_bytes: int = 0
    """Memory that pages take or took."""
    budget_bytes: int = 0
    loans: int = 0
    evicted_pages: int = 0
    brought_pages: int = 0
    """From other hosts' stores."""
    sent_pages: int = 0
    """To other hosts' stores."""


class Lent(msgspec.Struct, frozen=True):
    lease: int
    slots: tuple[int, ...]


class Granted(msgspec.Struct, frozen=True):
    lease: int
    wanted: tuple[Wanted, ...]
    evicted: int


class _Lease(msgspec.Struct):
    owner: Owner
    keys: list[bytes]
    reserved: bool
    """Whether its pages are to be written; else they are pinned."""


class Shelves:
    """Thread-safe. `hold` alone waits.

    Raises:
        OSError: no memory can be had at all.
    """

    def __init__(self, budget_bytes: int, geometry: PageGeometry) -> None:
        self.geometry = geometry
        slots = max(1, budget_bytes // geometry.page_bytes)
        self.descriptor = memory.create(slots, geometry)
        self._memory = memory.PageMemory(self.descriptor, slots, geometry)
        self._index = Index(slots)
        self._backed = 0
        self._ahead = False
        self._closed = False
        self._leases: dict[int, _Lease] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._counts = StoreCounts()

    @property
    def slots(self) -> int:
        return self._memory.slots

    def page(self, slot: int, *, writable: bool = False) -> Patterns:
        return self._memory.page(slot, writable=writable)

    def held(self, keys: Sequence[bytes]) -> int:
        with self._changed:
            return self._index.leading(keys)

    def first(self, keys: Sequence[bytes], *, awaited: bool = False) -> int | None:
        """As `Index.first`."""
        with self._changed:
            return self._index.first(keys, awaited=awaited)

    def brought(self, key: bytes) -> bool:
        """Whether that page came from another host."""
        with self._changed:
            return self._index.brought(key)

    def hold(
        self, owner: Owner, keys: Sequence[bytes], until_s: float, lease: int | None = None
    ) -> Lent | None:
        """Lends the leading keys that are held; waits for the next ones while somebody writes
        or brings them, at most until that time.

        Args:
            lease: one that they are added to; None: a new one. None comes back where it is gone.
        """
        with self._changed:
            while True:
                count = self._index.leading(keys)
                awaited = count < len(keys) and self._index.awaited(keys[count])
                left_s = until_s - monotonic_s()
                if not awaited or left_s <= 0:
                    break
                self._changed.wait(left_s)
            number = self._lease(owner, [], reserved=False) if lease is None else lease
            found = self._own(owner, number, reserved=False)
            if found is None:
                return None
            slots = self._index.pin(keys)
            found.keys += keys[: len(slots)]
            return Lent(number, slots)

    def reserve(
        self, owner: Owner, keys: Sequence[bytes], parent: bytes | None = None
    ) -> Granted | None:
        """Slots to write those pages into that are absent; None where there is no room."""
        with self._changed:
            found = self._index.reserve(keys, parent)
            if found is None:
                return None
            self._count(evicted_pages=found.evicted)
            self._changed.notify_all()
            ours = [keys[each.place] for each in found.wanted]
            if not self._back():
                self._index.drop(ours)
                self._index.cap(self._backed)
                log.warning("the memory is short: the store stays at %d pages", self._backed)
                return None
            return Granted(self._lease(owner, ours, reserved=True), found.wanted, found.evicted)

    def commit(
        self, owner: Owner, lease: int, keys: Sequence[bytes], *, brought: bool = False
    ) -> bool:
        """Pages of a reservation are written: everybody has them from now on."""
        with self._changed:
            found = self._own(owner, lease, reserved=True)
            if found is None or not set(keys) <= set(found.keys):
                return False
            self._index.commit(keys, brought=brought)
            self._count(brought_pages=len(keys) if brought else 0)
            found.keys = [key for key in found.keys if key not in set(keys)]
            self._changed.notify_all()
            return True

    def give_back(self, owner: Owner, lease: int) -> bool:
        """Ends a lease: what it has reserved and not committed does not come. False where
        there is none."""
        with self._changed:
            if self._own(owner, lease) is None:
                return False
            self._end(lease)
            return True

    def leave(self, owner: Owner) -> None:
        """The owner is gone, with all its leases."""
        with self._changed:
            for lease in [n for n, each in self._leases.items() if each.owner is owner]:
                self._end(lease)

    def count(self, **amounts: int) -> None:
        with self._changed:
            self._count(**amounts)

    def counts(self) -> StoreCounts:
        with self._changed:
            size = self.geometry.page_bytes
            return msgspec.structs.replace(
                self._counts,
                pages=len(self._index),
                used_bytes=self._backed * size,
                budget_bytes=self._index.slots * size,
                loans=len(self._leases),
            )

    @property
    def backed(self) -> int:
        """Of the first slots, as many have memory."""
        return self._backed

    def keep_ahead(self) -> None:
        """From now on the next `AHEAD_BYTES` of slots have their memory before they are used, as
        far as the budget and the machine go."""
        with self._changed:
            if self._ahead or self._closed:
                return
            self._ahead = True
            run = partial(self._run_ahead, os.dup(self.descriptor))
            threading.Thread(target=run, name="pdctl-store-ahead", daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        os.close(self.descriptor)

    def _run_ahead(self, descriptor: int) -> None:
        try:
            while (slot := self._next_ahead()) is not None:
                # nobody waits meanwhile; whoever backs the same slot now does no harm
                if not memory.back(descriptor, slot, self.geometry.page_bytes):
                    return
                with self._changed:
                    self._backed = max(self._backed, slot + 1)
        # a slot that has no memory when it is used is told of then
        except OSError as error:
            log.warning("no memory is taken ahead: %s", error)
        finally:
            os.close(descriptor)

    def _next_ahead(self) -> int | None:
        """Waits for a slot that should have memory; None at the end."""
        ahead = AHEAD_BYTES // self.geometry.page_bytes

        def lacking() -> bool:
            index = self._index
            return self._closed or self._backed < min(index.slots, index.used_slots + ahead)

        with self._changed:
            self._changed.wait_for(lacking)
            return None if self._closed else self._backed

    def _back(self) -> bool:
        """Memory for every slot that was handed out."""
        while self._backed < self._index.used_slots:
            if not memory.back(self.descriptor, self._backed, self.geometry.page_bytes):
                return False
            self._backed += 1
        return True

    def _lease(self, owner: Owner, keys: list[bytes], *, reserved: bool) -> int:
        number = next(self._numbers)
        self._leases[number] = _Lease(owner, keys, reserved)
        return number

    def _own(self, owner: Owner, lease: int, *, reserved: bool | None = None) -> _Lease | None:
        found = self._leases.get(lease)
        if found is None or found.owner is not owner:
            return None
        return found if reserved in (None, found.reserved) else None

    def _end(self, lease: int) -> None:
        ended = self._leases.pop(lease)
        if ended.reserved:
            self._index.drop(ended.keys)
            self._changed.notify_all()
        else:
            self._index.unpin(ended.keys)

    def _count(self, **amounts: int) -> None:
        now = {name: getattr(self._counts, name) + n for name, n in amounts.items()}
        self._counts = msgspec.structs.replace(self._counts, **now)
