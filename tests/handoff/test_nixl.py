"""NIXL itself: two processes, their deaths, and what an agent leaves behind. Needs nixl-cu12."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from handoff.apart.planes import ApartEnds, apart
from handoff.ends import DIGEST, KEY, WAIT_S, Leg, Sink, kv

from pdctl.errors import HandoffError, PeerLost
from pdctl.handoff.counters import CounterBoard
from pdctl.handoff.identity import Identity
from pdctl.handoff.page import PageGeometry
from pdctl.handoff.receiver import Inbound, PageSink, Receiver
from pdctl.handoff.slots import SLOTS
from pdctl.handoff.ticket import mint
from pdctl.handoff.transport.nixl import NixlReach, installed
from pdctl.handoff.transport.reach import rows
from pdctl.topology.model import Transport

pytestmark = pytest.mark.skipif(installed() is None, reason="needs nixl-cu12 in this environment")

GEOMETRY = PageGeometry(8, 2, 64)
LONG = 5000
"""Tokens: 10 MiB in 79 pages, each read in one piece of 256 KiB."""

SENDER = Path(__file__).with_name("nixl_sender.py")

_room = itertools.count(1)


class SenderProcess:
    def __init__(self, *arguments: object, script: Path = SENDER) -> None:
        argv = [sys.executable, str(script), *map(str, arguments)]
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        while not (line := self._line()).isdigit():
            assert line, self.process.wait(WAIT_S)
        self.port = int(line)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def leg(self) -> Leg:
        room = next(_room)
        ticket = mint(KEY, room, "p0", "d0", DIGEST, time.time() + 600)
        return Leg(room=room, ticket=ticket, sender=f"127.0.0.1:{self.port}", timeout_s=WAIT_S)

    def admit(self, leg: Leg) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(leg).decode() + "\n")
        self.process.stdin.flush()

    def outcome(self) -> str:
        return self._line()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def reach() -> Iterator[NixlReach]:
    made = NixlReach("d0", one_host=True)
    yield made
    made.close()


@pytest.fixture
def receiver(reach: NixlReach) -> Iterator[Receiver]:
    made = Receiver(
        Identity("d0", KEY, DIGEST),
        GEOMETRY,
        timeout_s=WAIT_S,
        board=CounterBoard(),
        on_failed=lambda room, cause, detail: None,
        clock=time.monotonic,
        reach=reach,
    )
    made._close_reach = lambda: None
    yield made
    made.close()


def fetched(receiver: Receiver, sender: SenderProcess, tokens: int, sink: PageSink) -> Inbound:
    leg = sender.leg()
    sender.admit(leg)
    return receiver.fetch(leg, list(range(tokens)), sink)


def check_whole(receiver: Receiver, sender: SenderProcess, tokens: int) -> None:
    sink = Sink(GEOMETRY, spare=0, first_token=True)
    check_received(receiver, sender, tokens, sink)
    assert sink.first_token == 7
    assert receiver._slots.free == SLOTS


def check_received(receiver: Receiver, sender: SenderProcess, tokens: int, sink: PageSink) -> None:
    inbound = fetched(receiver, sender, tokens, sink)
    assert inbound.settled.wait(WAIT_S)
    assert inbound.error is None
    np.testing.assert_array_equal(sink.pages, kv(tokens, GEOMETRY))
    assert sender.outcome() == "done"


def test_pages_of_another_process_land_bit_by_bit(receiver: Receiver) -> None:
    """R25: from the memory of a process that has its own; counted in host memory."""
    lengths = (1, 51, 65, 129, 193, 700, LONG)
    sender = SenderProcess(*lengths)
    try:
        for tokens in lengths:
            check_whole(receiver, sender, tokens)
        counters = receiver._board.read()
        pages = sum(GEOMETRY.pages_for(tokens) for tokens in lengths)
        assert counters.host_bytes == pages * GEOMETRY.page_bytes
        assert counters.gpu_bytes == 0
    finally:
        sender.close()


def test_ucx_listens_on_loopback_alone(receiver: Receiver) -> None:
    """R59: with every peer on this host, neither end can be reached from another."""
    sender = SenderProcess(65)
    try:
        check_whole(receiver, sender, 65)
        for process in (psutil.Process(), psutil.Process(sender.process.pid)):
            where = {
                each.laddr.ip
                for each in process.net_connections("tcp")
                if each.status == psutil.CONN_LISTEN
            }
            assert where == {"127.0.0.1"}
    finally:
        sender.close()


def test_a_sender_that_dies_is_lost_and_the_one_after_it_is_read(receiver: Receiver) -> None:
    """R61, U14: killed between two pieces; another process takes its place, and its card."""
    sender = SenderProcess(LONG)
    sink = Sink(GEOMETRY, spare=0, first_token=True)
    sink.hold("write")
    inbound = fetched(receiver, sender, LONG, sink)
    assert sink.inside.wait(WAIT_S)
    sender.close()
    sink.proceed.set()
    assert inbound.settled.wait(WAIT_S)
    assert isinstance(inbound.error, PeerLost)
    assert not sink.committed
    assert receiver._slots.free == SLOTS
    again = SenderProcess(LONG)
    try:
        check_whole(receiver, again, LONG)
    finally:
        again.close()


def test_a_frozen_sender_is_given_up_and_goes_on_when_it_thaws(receiver: Receiver) -> None:
    """R7: 5 s without a word; then its next handoff is whole."""
    sender = SenderProcess(LONG)
    try:
        check_whole(receiver, sender, LONG)
        sink = Sink(GEOMETRY, spare=0, first_token=True)
        sink.hold("write")
        inbound = fetched(receiver, sender, LONG, sink)
        assert sink.inside.wait(WAIT_S)
        os.kill(sender.process.pid, signal.SIGSTOP)
        sink.proceed.set()
        assert inbound.settled.wait(WAIT_S)
        assert isinstance(inbound.error, PeerLost)
        assert receiver._slots.free == SLOTS
        os.kill(sender.process.pid, signal.SIGCONT)
        assert sender.outcome() != "done"
        check_whole(receiver, sender, LONG)
    finally:
        sender.close()


def test_data_planes_beside_their_engines_read_each_other() -> None:
    """R25: the memory that is exposed is shared with the engine's process; so is what pieces are
    placed from."""
    with apart(transports={"p0": Transport.NIXL, "d0": Transport.NIXL}) as ends:
        for tokens in (2, 51, 65, 129, 193, 5000):
            sink = Sink(spare=0, first_token=True)
            assert ends.run(tokens, sink, chunk=50) is None
            np.testing.assert_array_equal(sink.pages, kv(tokens))
        assert ends.got.read().host_bytes == ends.sent.read().host_bytes > 0


def test_a_data_plane_whose_nixl_does_not_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not take TCP instead, without a word."""
    monkeypatch.setenv("UCX_TLS", "nothing")
    with pytest.raises(HandoffError, match="NIXL"):
        ApartEnds(transports={"p0": Transport.NIXL, "d0": Transport.NIXL})


def test_memory_that_was_not_exposed_is_not_read(reach: NixlReach) -> None:
    """A row outside of what the card names is refused here, before anything is asked of UCX."""
    owner = NixlReach("p1", one_host=True)
    try:
        exposed, secret = np.full(4096, 7, np.uint8), np.full(4096, 9, np.uint8)
        into = np.zeros(4096, np.uint8)
        owner.expose(exposed)
        reach.expose(into)
        card = owner.card()
        reach.meet(("127.0.0.1", 1), card)
        for address in (secret.ctypes.data, exposed.ctypes.data + 1, 0):
            with pytest.raises(PeerLost, match="can't read the memory of p1-"):
                reach.pull(card, rows(address, 4096, 0), into.data)
        pull = reach.pull(card, rows(exposed.ctypes.data, 4096, 0), into.data)
        while not pull.landed():
            time.sleep(1e-4)
        assert pull.release()
        np.testing.assert_array_equal(into, exposed)
    finally:
        owner.close()


def test_stretches_a_distance_apart_are_read_behind_one_another(reach: NixlReach) -> None:
    """The same layers of several pages, in one request; those that touch are one row."""
    owner = NixlReach("p1", one_host=True)
    try:
        exposed, into = np.arange(10_000) % 251, np.zeros(400, np.uint8)
        exposed = exposed.astype(np.uint8)
        owner.expose(exposed)
        reach.expose(into)
        reach.meet(("127.0.0.1", 1), owner.card())
        apart = rows(exposed.ctypes.data + 50, 100, 0, every=1000, times=4)
        pull = reach.pull(owner.card(), apart, into.data)
        while not pull.landed():
            time.sleep(1e-4)
        assert pull.release()
        np.testing.assert_array_equal(
            into.reshape(4, 100), exposed[:4000].reshape(4, -1)[:, 50:150]
        )
        assert rows(8, 100, 3, every=100, times=4).tolist() == [[8, 400, 3]]
    finally:
        owner.close()


@pytest.mark.parametrize("cut", [0, 10, 100, 300])
def test_a_card_that_is_none_is_refused(reach: NixlReach, cut: int) -> None:
    """Garbage of any length: an error of this handoff, and the next one reads."""
    owner = NixlReach("p2", one_host=True)
    try:
        broken = owner.card()[:cut] if cut else os.urandom(300)
        with pytest.raises(PeerLost, match="card is refused"):
            reach.meet(("127.0.0.1", 2), broken)
    finally:
        owner.close()


def test_a_card_that_changes_replaces_the_one_before(reach: NixlReach) -> None:
    """U14: one sender's address, two processes after each other: NIXL knows the newer alone."""
    cards = []
    for _ in range(3):
        owner = NixlReach("p3", one_host=True)
        cards.append(owner.card())
        reach.meet(("127.0.0.1", 3), cards[-1])
        owner.close()
    assert len(set(cards)) == 3
    assert [card in reach._peers for card in cards] == [False, False, True]


def test_an_agent_that_was_closed_leaves_neither_threads_nor_descriptors() -> None:
    """U26: once UCX has opened what it keeps for the process."""

    def held() -> tuple[int, int]:
        this = psutil.Process()
        return this.num_fds(), this.num_threads()

    NixlReach("p4", one_host=True).close()
    before = held()
    for _ in range(3):
        reach = NixlReach("p4", one_host=True)
        reach.expose(np.zeros(1 << 20, np.uint8))
        reach.close()
    deadline = time.monotonic() + WAIT_S
    while (after := held()) != before:
        assert time.monotonic() < deadline, (before, after)
        time.sleep(0.05)


def test_the_thread_of_an_idle_agent_rests() -> None:
    """It gives its core back by itself, again and again; one that only turns never does."""
    before = rests_of_threads()
    reach = NixlReach("p5", one_host=True)
    try:
        made = rests_of_threads().keys() - before.keys()
        assert made
        deadline = time.monotonic() + WAIT_S
        at_first = rests_of_threads()
        while not all(rests_of_threads()[each] >= at_first[each] + 10 for each in made):
            assert time.monotonic() < deadline, (at_first, rests_of_threads())
            time.sleep(0.05)
    finally:
        reach.close()


def rests_of_threads() -> dict[int, int]:
    """Thread of this process → how often it has waited for something."""
    rests = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = (task / "status").read_text().splitlines()
            found = next(line for line in lines if line.startswith("voluntary_ctxt_switches"))
            rests[int(task.name)] = int(found.split()[1])
    return rests
