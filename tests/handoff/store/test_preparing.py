"""A store's memory at a replica, before its pages come."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from handoff.store.stores import CONTRACT, WAIT_S, Host, Replica, host

from pdctl.handoff.store import preparing, shelves
from pdctl.topology.contract import Attention, Contract

WHOLE = msgspec.structs.replace(
    CONTRACT, attention=Attention(kind="full", layers=2, kv_heads=1, head_dim=8)
)
"""A page of it is one of the operating system's."""
PAGE_BYTES = 4096
PAGES, AHEAD = 12, 5


class Driver:
    """Counts what it locks, and what of it is locked still."""

    def __init__(self, most: int = 1000) -> None:
        self.sizes: list[int] = []
        self.unlocked = 0
        self._most = most

    @property
    def pages(self) -> int:
        return sum(self.sizes) // PAGE_BYTES

    def __call__(self, memory: Any) -> None:
        if len(self.sizes) == self._most:
            raise MemoryError("no more")
        self.sizes.append(memory.nbytes)
        weakref.finalize(memory, self._unlock).atexit = False

    def _unlock(self) -> None:
        self.unlocked += 1


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "CELL_BYTES", 2 * PAGE_BYTES)
    monkeypatch.setattr(preparing, "QUIET_S", 0.0)
    monkeypatch.setattr(shelves, "AHEAD_BYTES", AHEAD * PAGE_BYTES)


def opened(store: Host, driver: Driver | None, contract: Contract = WHOLE) -> Replica:
    made = Replica(store.path, contract, lock=driver)
    made.connect()
    return made


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def learn(replica: Replica) -> None:
    """Every answer of the store says how much of it has memory."""
    replica.store.borrow([bytes(32)]).release()


def test_memory_is_prepared_before_pages_come(tmp_path: Path) -> None:
    """R43: and within the budget."""
    with host(tmp_path / "s", PAGES, contract=WHOLE) as store:
        driver = Driver()
        replica = opened(store, driver)
        for stored in (0, 4, 4, 4):
            if stored:
                start = 1000 * driver.pages
                replica.store.publish(
                    replica.store.prompt(list(range(start, start + 64 * stored))).pages,
                    lambda _, page: page.fill(1),
                )
            least = min(PAGES, replica.board.read().stored_pages + AHEAD)
            until(lambda least=least: store.shelves.backed == least)
            learn(replica)
            until(lambda: driver.pages == store.shelves.backed)
        assert store.shelves.counts().used_bytes == PAGES * PAGE_BYTES
        assert max(driver.sizes) == 2 * PAGE_BYTES
        replica.store.close()


def test_without_a_driver_it_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pages that share one of the system's too, which can't be locked twice."""
    touched: list[int] = []
    touch = preparing.touch

    def counted(memory: Any) -> None:
        touch(memory)
        touched.append(memory.nbytes)

    monkeypatch.setattr(preparing, "touch", counted)
    for contract, driver in ((WHOLE, None), (CONTRACT, Driver())):
        touched.clear()
        with host(tmp_path / "s", PAGES, contract=contract) as store:
            replica = opened(store, driver, contract)
            until(lambda store=store: store.shelves.backed >= AHEAD)
            learn(replica)
            until(lambda: sum(touched) >= AHEAD * PAGE_BYTES)
            replica.store.close()
            assert driver is None or driver.sizes == []


def test_what_a_dead_store_had_is_unlocked(tmp_path: Path) -> None:
    """Else each of its lives would take its memory once more; not before its loans are over."""
    with host(tmp_path / "s", PAGES, contract=WHOLE) as store:
        driver = Driver()
        replica = opened(store, driver)
        until(lambda: store.shelves.backed == AHEAD)
        learn(replica)
        assert store.returned()
        loan = replica.store.borrow([bytes(32)])
        until(lambda: driver.pages == AHEAD)
        store.server.close()
        replica.connect(wanted=False)
        assert driver.unlocked == 0
        loan.release()
        del loan
        until(lambda: driver.unlocked == len(driver.sizes))
        replica.store.close()


def test_a_driver_that_locks_no_more_ends_nothing(tmp_path: Path) -> None:
    """R35: what is not locked is copied once more."""
    with host(tmp_path / "s", PAGES, contract=WHOLE) as store:
        driver = Driver(most=1)
        replica = opened(store, driver)
        until(lambda: store.shelves.backed == AHEAD)
        learn(replica)
        until(lambda: driver.pages == 2)
        keys = replica.store.prompt(list(range(64))).pages
        assert replica.store.publish(keys, lambda _, page: page.fill(1)) == 1
        replica.store.close()
