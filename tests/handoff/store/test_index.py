"""The index against a dictionary: what is held, what goes first, and what never goes."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdctl.handoff.store.index import Index

CHAINS = tuple(
    tuple(f"{'/'.join(map(str, path[: depth + 1]))}".encode() for depth in range(len(path)))
    for path in [(0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0), (1, 0, 0, 0, 0), (1, 0, 1), (2, 0)]
)
"""Six prompts' keys, page by page; those that begin alike share them."""

chains = st.sampled_from(CHAINS)


class Page(msgspec.Struct):
    """What the dictionary knows of a page."""

    parent: bytes | None
    used: int
    held: bool = False
    pins: int = 0


class Against(RuleBasedStateMachine):
    """Every operation on both; victims are chosen the slow way."""

    @initialize(slots=st.integers(1, 7))
    def start(self, slots: int) -> None:
        self.index = Index(slots)
        self.slots = slots
        self.pages: dict[bytes, Page] = {}
        self.where: dict[bytes, int] = {}
        self.lent: list[tuple[bytes, ...]] = []
        self.writing: list[tuple[bytes, ...]] = []
        self.now = 0

    def touch(self, key: bytes) -> None:
        each: bytes | None = key
        while each is not None and each in self.pages:
            self.now += 1
            self.pages[each].used = self.now
            each = self.pages[each].parent

    def leading(self, keys: tuple[bytes, ...]) -> tuple[bytes, ...]:
        found = []
        for key in keys:
            if key not in self.pages or not self.pages[key].held:
                break
            found.append(key)
        return tuple(found)

    def victims(self, count: int, spared: set[bytes]) -> list[bytes] | None:
        """One after the other: the least recently used page that nothing follows."""
        left = dict(self.pages)
        found: list[bytes] = []
        while len(left) + count > self.slots:
            followed = {page.parent for page in left.values()}
            free = [
                key
                for key, page in left.items()
                if page.held and not page.pins and key not in followed and key not in spared
            ]
            if not free:
                return None
            found.append(min(free, key=lambda key: left[key].used))
            del left[found[-1]]
        return found

    @rule(keys=chains)
    def pin(self, keys: tuple[bytes, ...]) -> None:
        """R46: what is lent is counted here, and must still be there at every invariant."""
        slots = self.index.pin(keys)
        expected = self.leading(keys)
        assert slots == tuple(self.where[key] for key in expected)
        for key in expected:
            self.pages[key].pins += 1
        if expected:
            self.touch(expected[-1])
            self.lent.append(expected)

    @rule(which=st.integers(0, 9))
    def unpin(self, which: int) -> None:
        if self.lent:
            keys = self.lent.pop(which % len(self.lent))
            self.index.unpin(keys)
            for key in keys:
                self.pages[key].pins -= 1

    @rule(keys=chains, start=st.integers(0, 3))
    def reserve(self, keys: tuple[bytes, ...], start: int) -> None:
        """R43, R44: the same victims, in the order of use, tails first; or none at all."""
        parent = keys[start - 1] if 0 < start < len(keys) else None
        keys = keys[start:] if start < len(keys) else keys
        absent = [key for key in keys if key not in self.pages]
        spared = {*keys, parent} if parent else set(keys)
        reachable = parent is None or parent in self.pages
        victims = self.victims(len(absent), spared) if reachable else None
        if len(absent) > self.slots:
            victims = None
        found = self.index.reserve(keys, parent)
        if victims is None:
            assert found is None
            return
        assert found is not None
        assert [keys[each.place] for each in found.wanted] == absent
        assert found.evicted == len(victims)
        for key in victims:
            del self.pages[key], self.where[key]
        for each in found.wanted:
            key = keys[each.place]
            before = keys[each.place - 1] if each.place else parent
            self.pages[key] = Page(parent=before, used=0)
            self.where[key] = each.slot
        self.touch(keys[-1])
        if absent:
            self.writing.append(tuple(absent))

    @rule(which=st.integers(0, 9), written=st.booleans())
    def finish(self, which: int, written: bool) -> None:
        if not self.writing:
            return
        keys = self.writing.pop(which % len(self.writing))
        if written:
            self.index.commit(keys)
            for key in keys:
                self.pages[key].held = True
        else:
            self.index.drop(keys)
            for key in keys:
                del self.pages[key], self.where[key]

    @invariant()
    def same(self) -> None:
        """The same pages, each in a slot of its own within the budget; none whose predecessor
        is gone, but where that was never written."""
        if not hasattr(self, "index"):
            return
        assert len(self.index) == len(self.pages) <= self.slots
        assert len(set(self.where.values())) == len(self.where)
        assert all(0 <= slot < self.slots for slot in self.where.values())
        for keys in CHAINS:
            assert self.index.leading(keys) == len(self.leading(keys))
        for keys in self.lent:
            assert self.index.leading(keys) == len(keys)
        for key, page in self.pages.items():
            assert self.index.awaited(key) == (not page.held)


TestAgainst = Against.TestCase
TestAgainst.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_tails_go_before_heads_and_a_hit_refreshes_its_chain() -> None:
    """R43: with a chain of three and one of two in five slots, a hit on the first page of the
    older one keeps that, and the newer one's tail goes after the older one's."""
    index = Index(5)
    for keys in ((b"a0", b"a1", b"a2"), (b"b0", b"b1")):
        assert index.reserve(keys) is not None
        index.commit(keys)
    index.unpin((b"a0",)[: len(index.pin((b"a0",)))])
    gone = []
    for at in range(4):
        new = f"n{at}".encode()
        assert index.reserve((new,)) is not None
        index.commit((new,))
        left = {key for key in (b"a0", b"a1", b"a2", b"b0", b"b1") if index.leading((key,))}
        gone.append(left)
    assert gone == [
        {b"a0", b"a1", b"b0", b"b1"},
        {b"a0", b"b0", b"b1"},
        {b"a0", b"b0"},
        {b"a0"},
    ]


def test_an_oversize_reservation_evicts_nothing() -> None:
    """R44: more than all slots, or more than what may go, is refused whole."""
    index = Index(3)
    index.reserve((b"a", b"b"))
    index.commit((b"a", b"b"))
    assert index.reserve(tuple(bytes([n]) for n in range(4))) is None
    index.pin((b"a",))
    assert index.reserve((b"x", b"y", b"z")) is None
    assert index.leading((b"a", b"b")) == 2


def test_memory_that_is_short_makes_a_smaller_store() -> None:
    """Slots without memory are never handed out again; those with it go on."""
    index = Index(4)
    index.reserve((b"a", b"b"))
    index.commit((b"a", b"b"))
    index.reserve((b"c",))
    index.drop((b"c",))
    index.cap(2)
    found = index.reserve((b"d",))
    assert found is not None
    assert found.wanted[0].slot < 2
    assert index.reserve((b"e", b"f", b"g")) is None
