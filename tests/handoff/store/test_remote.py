"""Stores of several hosts: what another one holds is brought, once, whole, or not at all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from handoff.ends import KEY
from handoff.secure import OTHER, encrypted
from handoff.store.stores import GEOMETRY, WAIT_S, Host, Replica, clients, host, pages_of

from pdctl.errors import HandoffError
from pdctl.handoff import wire
from pdctl.handoff.handshake import answer
from pdctl.handoff.link import Link
from pdctl.handoff.store import others as others_module
from pdctl.handoff.store.others import Others
from pdctl.handoff.store.remote import RemoteServer, within
from pdctl.handoff.transport.interface import Transport
from pdctl.handoff.transport.memory import MemoryLink, MemoryTransport
from pdctl.handoff.transport.tcp import TcpConnection, TcpTransport
from pdctl.trace import monotonic_s

DOCUMENT = list(range(1000, 1700))
"""700 tokens: ten full pages, and a tail of 60."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be busy with others."""
    monkeypatch.setattr(others_module, "ASK_S", WAIT_S)


class Far:
    """Two hosts' stores and a replica on each: `near` asks `far`."""

    def __init__(
        self, address: tuple[str, int], far: Host, near: Host, giver: Replica, taker: Replica
    ) -> None:
        self.address = address
        self.far, self.near, self.giver, self.taker = far, near, giver, taker


@contextmanager
def two_hosts(
    folder: Path, transport: Transport, dialled: Transport | None = None, key: bytes = KEY
) -> Iterator[Far]:
    """Args: `dialled`, `key`: what the near host dials with."""
    with host(folder / "far.kv") as far:
        remote = RemoteServer(KEY, far.shelves, transport)
        address = ("127.0.0.1", remote.start(("127.0.0.1", 0)))
        others = partial(Others, key, addresses={"far": address}, transport=dialled or transport)
        try:
            with (
                host(folder / "near.kv", elsewhere=others) as near,
                clients(far.path, 1) as (giver,),
                clients(near.path, 1) as (taker,),
            ):
                yield Far(address, far, near, giver, taker)
        finally:
            remote.close()


@pytest.mark.parametrize("transport", [TcpTransport(), encrypted()], ids=["tcp", "tls"])
def test_another_hosts_pages_are_brought(tmp_path: Path, transport: Transport) -> None:
    """All of a prompt comes over the data plane, its partial tail too; the second time it is
    there already (R45)."""
    with two_hosts(tmp_path, transport) as hosts:
        hosts.giver.give(DOCUMENT)
        tokens, pages = hosts.taker.take(DOCUMENT)
        assert tokens == 700
        np.testing.assert_array_equal(pages, pages_of(DOCUMENT))
        assert hosts.taker.take(DOCUMENT)[0] == 700
        assert hosts.near.shelves.counts().brought_pages == 11
        assert hosts.far.shelves.counts().sent_pages == 11
        assert hosts.taker.give(DOCUMENT) == 0


def test_only_what_is_missing_travels(tmp_path: Path) -> None:
    """R45: pages that are held are not sent again."""
    with two_hosts(tmp_path, TcpTransport()) as hosts:
        hosts.giver.give(DOCUMENT)
        hosts.taker.give(DOCUMENT[:256])
        assert hosts.taker.take(DOCUMENT)[0] == 700
        assert hosts.far.shelves.counts().sent_pages == 7


def test_more_keys_than_a_frame_takes_are_all_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R47: big batches are split, not missed."""
    monkeypatch.setattr(wire, "MAX_ASKED", 3)
    with two_hosts(tmp_path, TcpTransport()) as hosts:
        hosts.giver.give(DOCUMENT[:640])
        assert hosts.taker.take(DOCUMENT[:640])[0] == 640


def test_two_that_ask_at_once_bring_it_once(tmp_path: Path) -> None:
    """What is on its way is reserved: nobody brings it a second time, and both get it."""
    with two_hosts(tmp_path, TcpTransport()) as hosts, clients(hosts.near.path) as (a, b):
        hosts.giver.give(DOCUMENT)
        found: list[int] = []
        asking = [
            threading.Thread(target=lambda each=each: found.append(each.take(DOCUMENT)[0]))
            for each in (a, b, hosts.taker)
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(WAIT_S)
        assert found == [700, 700, 700]
        assert hosts.near.shelves.counts().brought_pages == 11


@pytest.mark.parametrize(
    ("listening", "dialled", "key"),
    [
        (TcpTransport(), TcpTransport(), bytes(32)),
        (encrypted(), encrypted(certificate=OTHER), KEY),
        (encrypted(), TcpTransport(), KEY),
    ],
    ids=["another key", "another certificate", "no TLS"],
)
def test_a_store_of_another_cluster_gets_nothing(
    tmp_path: Path, listening: Transport, dialled: Transport, key: bytes
) -> None:
    """Without the cluster's key, or its certificate, every prompt is a miss."""
    with two_hosts(tmp_path, listening, dialled, key) as hosts:
        hosts.giver.give(DOCUMENT)
        assert hosts.taker.take(DOCUMENT)[0] == 0
        assert hosts.far.shelves.counts().sent_pages == 0


@pytest.mark.parametrize("after", [40, 400, 5_000, 11_000, 20_000])
def test_a_link_that_breaks_leaves_whole_pages_alone(tmp_path: Path, after: int) -> None:
    """Whatever byte is the last one that arrives, what is taken is right, and the rest a miss
    that somebody else can store."""
    armed: list[MemoryLink] = []

    def arm(link: MemoryLink) -> None:
        armed.append(link)
        link.down.stop_after(after, link.cut)

    with two_hosts(tmp_path, MemoryTransport(arm)) as hosts:
        hosts.giver.give(DOCUMENT)
        tokens, pages = hosts.taker.take(DOCUMENT)
        assert tokens % 64 == 0
        np.testing.assert_array_equal(pages, pages_of(DOCUMENT)[: tokens // 64])
        assert hosts.taker.give(DOCUMENT) == 11 - tokens // 64
        assert hosts.taker.take(DOCUMENT)[0] == 700
    assert armed


class Counting(TcpTransport):
    """Of how often it dials."""

    def __init__(self) -> None:
        super().__init__()
        self.dialled = 0

    def dial(self, address: tuple[str, int], timeout_s: float) -> TcpConnection:
        self.dialled += 1
        return super().dial(address, timeout_s)


def test_a_store_that_does_not_answer_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt waits for a dead store once, and the next ones not at all."""
    monkeypatch.setattr(others_module, "DIAL_S", 0.2)
    monkeypatch.setattr(others_module, "AWAY_S", WAIT_S)
    transport = Counting()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        others = partial(Others, KEY, addresses={"far": silent.getsockname()}, transport=transport)
        with host(tmp_path / "s.kv", elsewhere=others) as near, clients(near.path, 1) as (a,):
            assert a.take(DOCUMENT)[0] == 0
            assert [a.take(range(at, at + 128))[0] for at in range(0, 2000, 200)] == [0] * 10
            assert transport.dialled == 1


@pytest.mark.parametrize("proved", [False, True])
def test_strangers_are_heard_of_and_no_more(tmp_path: Path, proved: bool) -> None:
    """Bytes that are no request end their connection; whoever asks properly is served."""
    with two_hosts(tmp_path, TcpTransport()) as hosts:
        link = Link(TcpTransport().dial(hosts.address, WAIT_S), GEOMETRY, monotonic_s)
        with within(link.connection, WAIT_S):
            if proved:
                answer(link, KEY)
                link.send(wire.Renew(tokens=1))
            else:
                link.send(wire.Ask(keys=(bytes(32),), pages=True))
            if not proved:
                assert isinstance(link.read_message(link.read_header()), wire.Challenge)
            with pytest.raises(HandoffError):
                link.read_header()
        link.connection.close()
        hosts.giver.give(DOCUMENT)
        assert hosts.taker.take(DOCUMENT)[0] == 700
