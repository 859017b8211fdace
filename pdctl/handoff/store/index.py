"""Which pages are held, in which slots, and which go first. Pure: no I/O, no locks, no clock.

Every page knows the one before it in its chain. Whatever touches a page touches all that stand
before it afterwards, so that in the order of use a page always precedes its predecessors: what
is taken first is the tail of the chain that was least recently used (R43).

    absent → reserved (being written, or brought from another host) → held → absent
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

import msgspec


class Wanted(msgspec.Struct, frozen=True):
    """One page that a reservation is to fill: its place among the keys, and its slot."""

    place: int
    slot: int


class Reservation(msgspec.Struct, frozen=True):
    """What is to be written; pages that are held or being written are not in it."""

    wanted: tuple[Wanted, ...]
    evicted: int = 0


class _Page:
    __slots__ = ("brought", "held", "parent", "pins", "slot")

    def __init__(self, slot: int, parent: bytes | None) -> None:
        self.slot = slot
        self.parent = parent
        self.held = False
        self.brought = False
        self.pins = 0


class Index:
    """Of `slots` pages. A caller's lock guards it."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.used_slots = 0
        """Slots that were ever handed out: 0 to this."""
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()
        self._following: dict[bytes, int] = {}
        """Key → pages that are here and come right after it; it may be absent itself."""
        self._free: list[int] = []

    def __len__(self) -> int:
        """Pages that are held or reserved."""
        return len(self._pages)

    def leading(self, keys: Iterable[bytes]) -> int:
        """How many of the leading keys are held."""
        count = 0
        for key in keys:
            page = self._pages.get(key)
            if page is None or not page.held:
                break
            count += 1
        return count

    def first(self, keys: Sequence[bytes], *, awaited: bool = False) -> int | None:
        """The place of the first key that is held; with `awaited` one that is under way is, too."""
        for at, key in enumerate(keys):
            page = self._pages.get(key)
            if page is not None and (page.held or awaited):
                return at
        return None

    def brought(self, key: bytes) -> bool:
        """Whether it came from another host."""
        page = self._pages.get(key)
        return page is not None and page.brought

    def awaited(self, key: bytes) -> bool:
        """Whether it is being written or brought."""
        page = self._pages.get(key)
        return page is not None and not page.held

    def pin(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """The slots of the leading keys that are held, which stay until `unpin`; their whole
        chain is refreshed."""
        count = self.leading(keys)
        pages = [self._pages[key] for key in keys[:count]]
        for page in pages:
            page.pins += 1
        if count:
            self._touch(keys[count - 1])
        return tuple(page.slot for page in pages)

    def unpin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._pages[key].pins -= 1

    def reserve(self, keys: Sequence[bytes], parent: bytes | None = None) -> Reservation | None:
        """Slots for those of consecutive pages that are absent, evicting what it must.

        Args:
            parent: the key of the page before the first; None where that is a prompt's first.

        Returns:
            None where there is no room for all of them, or nobody could reach them because
            `parent` is absent: then nothing is evicted (R44).
        """
        if parent is not None and parent not in self._pages:
            return None
        absent: dict[bytes, int] = {}
        for at, key in enumerate(keys):
            if key not in self._pages:
                absent.setdefault(key, at)
        victims = self._victims(len(absent), {*keys, parent})
        if victims is None:
            return None
        for key in victims:
            self._remove(key)
        wanted = []
        for key, at in absent.items():
            page = self._add(key, keys[at - 1] if at else parent)
            wanted.append(Wanted(at, page.slot))
        if keys:
            self._touch(keys[-1])
        return Reservation(tuple(wanted), len(victims))

    def commit(self, keys: Iterable[bytes], *, brought: bool = False) -> None:
        """Reserved pages are held from now on."""
        for key in keys:
            self._pages[key].held = True
            self._pages[key].brought = brought

    def drop(self, keys: Iterable[bytes]) -> None:
        """Reserved pages will not come."""
        for key in keys:
            self._remove(key)

    def cap(self, slots: int) -> None:
        """Slots from this one on have no memory, and never will; whatever had them is dropped."""
        self._free = [slot for slot in self._free if slot < slots]
        self.slots, self.used_slots = slots, min(slots, self.used_slots)

    def _victims(self, count: int, spared: Collection[bytes | None]) -> list[bytes] | None:
        """The least recently used pages that nothing follows, as many as `count` new ones need."""
        if count > self.slots:
            return None
        short = count - len(self._free) - (self.slots - self.used_slots)
        found: list[bytes] = []
        gone: dict[bytes, int] = {}
        for key, page in self._pages.items():
            if len(found) >= short:
                break
            followed = self._following.get(key, 0) > gone.get(key, 0)
            if page.held and not (page.pins or followed or key in spared):
                found.append(key)
                if page.parent is not None:
                    gone[page.parent] = gone.get(page.parent, 0) + 1
        return found if len(found) >= short else None

    def _add(self, key: bytes, parent: bytes | None) -> _Page:
        if self._free:
            slot = self._free.pop()
        else:
            slot = self.used_slots
            self.used_slots += 1
        page = self._pages[key] = _Page(slot, parent)
        if parent is not None:
            self._following[parent] = self._following.get(parent, 0) + 1
        return page

    def _remove(self, key: bytes) -> None:
        page = self._pages.pop(key)
        self._free.append(page.slot)
        if page.parent is not None:
            left = self._following.pop(page.parent) - 1
            if left:
                self._following[page.parent] = left

    def _touch(self, key: bytes) -> None:
        """That page, then all before it, as far as they are here."""
        each: bytes | None = key
        for _ in range(len(self._pages)):
            if each is None or each not in self._pages:
                break
            self._pages.move_to_end(each)
            each = self._pages[each].parent
