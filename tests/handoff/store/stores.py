"""A store and its clients in one process, on a real socket and real shared memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.page import PageGeometry, Patterns
from pdctl.handoff.store.client import StoreClient
from pdctl.handoff.store.interface import Loan, StoreSeat
from pdctl.handoff.store.local import LocalServer
from pdctl.handoff.store.others import Others
from pdctl.handoff.store.shelves import Shelves
from pdctl.topology.contract import Attention, Contract, Positions
from pdctl.topology.model import Dtype

CONTRACT = Contract(
    weights="w",
    tokenizer="t",
    chat_template="c",
    attention=Attention(kind="full", layers=2, kv_heads=1, head_dim=4),
    positions=Positions(rope_theta=1e4, max_positions=4096, context_length=4096),
    dtype=Dtype.FLOAT16,
)
GEOMETRY = PageGeometry.of(CONTRACT)
WAIT_S = 20.0
"""Far beyond anything that passes; only a failing test waits for it."""


class Host:
    """One host's store, and whoever uses it."""

    def __init__(
        self,
        path: Path,
        pages: int = 64,
        elsewhere: Callable[[Shelves], Others] | None = None,
        contract: Contract = CONTRACT,
    ) -> None:
        self.path = str(path)
        geometry = PageGeometry.of(contract)
        self.shelves = Shelves(pages * geometry.page_bytes, geometry)
        self._contract = contract.digest
        self._elsewhere = elsewhere(self.shelves) if elsewhere is not None else None
        self.serve()

    def serve(self) -> None:
        """Again, after its server was closed."""
        self.server = LocalServer(self.path, self.shelves, self._contract, self._elsewhere)
        self.server.start()

    def returned(self) -> bool:
        """Waits until nothing is lent; False where it was not in time."""
        until_s = time.monotonic() + WAIT_S
        while self.shelves.counts().loans:
            if time.monotonic() > until_s:
                return False
        return True

    def close(self) -> None:
        self.server.close()
        if self._elsewhere is not None:
            self._elsewhere.close()
        self.shelves.close()


@contextmanager
def host(
    path: Path,
    pages: int = 64,
    elsewhere: Callable[[Shelves], Others] | None = None,
    contract: Contract = CONTRACT,
) -> Iterator[Host]:
    """A store that serves at `path`."""
    made = Host(path, pages, elsewhere, contract)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def clients(path: str, count: int = 2, contract: Contract = CONTRACT) -> Iterator[list[Replica]]:
    """Clients of a store that is there."""
    with ExitStack() as stack:
        found = [Replica(path, contract) for _ in range(count)]
        for each in found:
            stack.callback(each.store.close)
        for each in found:
            each.connect()
        yield found


class Replica:
    """A client, with its counters."""

    def __init__(self, path: str, contract: Contract = CONTRACT, lock: Any = None) -> None:
        self.board = CounterBoard()
        seat = StoreSeat(socket=path)
        self.store = StoreClient(seat, contract=contract, board=self.board, lock=lock)

    def connect(self, wanted: bool = True) -> None:
        assert self.store.settled(wanted, WAIT_S), "the store was not there in time"

    def give(self, ids: Sequence[int], salt: str = "") -> int:
        """Stores a whole prompt; how many pages were written."""
        prompt = self.store.prompt(ids, salt)
        pages = pages_of(ids)

        def write(place: int, page: Patterns) -> None:
            page[...] = pages[place]

        return self.store.publish(prompt.stored(), write)

    def take(self, ids: Sequence[int], salt: str = "") -> tuple[int, Patterns]:
        """(tokens held, a copy of their pages)."""
        loan = self.store.hold(self.store.prompt(ids, salt), WAIT_S)
        copy = np.array(loan.pages).reshape(-1, *GEOMETRY.shape)
        assert loan.release(loan.tokens)
        return loan.tokens, copy


def pages_of(ids: Sequence[int]) -> Patterns:
    """Pages whose every slot tells its token and its place; zero past the last one."""
    pages = GEOMETRY.empty(len(ids))
    for at, token in enumerate(ids):
        page, slot = divmod(at, GEOMETRY.page_tokens)
        pages[page, :, :, slot] = (token * 31 + at * 7 + 1) % 65536
    return pages


def soon(store: StoreClient, ids: Sequence[int]) -> Loan:
    """What `hold_soon` tells."""
    told, found = threading.Event(), []

    def tell(loan: Loan) -> None:
        found.append(loan)
        told.set()

    store.hold_soon(store.prompt(ids), tell)
    assert told.wait(WAIT_S)
    return found[0]
