"""The page store on its host: what one replica stored, another takes, and nothing else."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from handoff.store.stores import (
    CONTRACT,
    GEOMETRY,
    WAIT_S,
    Host,
    Replica,
    clients,
    host,
    pages_of,
    soon,
)

from pdctl.handoff.page import Patterns
from pdctl.handoff.store import frames
from pdctl.handoff.store.attached import StoreLost, attach
from pdctl.trace import monotonic_s

DOCUMENT = list(range(1000, 1700))
"""700 tokens: ten full pages, and a tail of 60."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.sock"


@pytest.fixture
def store(path: Path) -> Iterator[Host]:
    with host(path) as made:
        yield made


@pytest.fixture
def pair(store: Host) -> Iterator[list[Replica]]:
    with clients(store.path) as found:
        yield found


def test_a_prompt_of_one_replica_is_whole_for_another(pair: list[Replica]) -> None:
    """Every full page and the partial tail come back as they were written."""
    a, b = pair
    assert a.give(DOCUMENT) == 11
    tokens, pages = b.take(DOCUMENT)
    assert tokens == len(DOCUMENT)
    np.testing.assert_array_equal(pages, pages_of(DOCUMENT))
    assert b.board.read().reused_tokens == 700


def test_another_question_takes_every_shared_full_page(pair: list[Replica]) -> None:
    """A prompt that goes on otherwise inside a page takes the full pages before that."""
    a, b = pair
    a.give(DOCUMENT)
    tokens, pages = b.take([*DOCUMENT[:650], *range(40)])
    assert tokens == 640
    np.testing.assert_array_equal(pages, pages_of(DOCUMENT)[:10])


def test_a_conversation_takes_the_tail_of_its_last_turn(pair: list[Replica]) -> None:
    """A prompt that another one begins with is taken whole, its partial tail too."""
    a, b = pair
    a.give(DOCUMENT)
    assert b.take([*DOCUMENT, *range(300)])[0] == 700


def test_salts_keep_tenants_apart(pair: list[Replica]) -> None:
    """R48: what was stored with one salt is a miss with another, and without one."""
    a, b = pair
    a.give(DOCUMENT, salt="tenant-a")
    assert b.take(DOCUMENT)[0] == 0
    assert b.take(DOCUMENT, salt="tenant-b")[0] == 0
    assert b.take(DOCUMENT, salt="tenant-a")[0] == 700


def test_nothing_is_stored_twice(pair: list[Replica]) -> None:
    """A prompt that is there already is not written again."""
    a, b = pair
    a.give(DOCUMENT)
    assert b.give(DOCUMENT) == 0
    assert b.give([*DOCUMENT, *range(100)]) == 3


def test_lent_pages_outlive_pressure(path: Path) -> None:
    """R46: what is lent stays as it is however much else is stored."""
    with host(path, pages=12) as made, clients(made.path) as (a, b):
        a.give(DOCUMENT)
        loan = b.store.hold(b.store.prompt(DOCUMENT))
        for start in range(0, 60_000, 2000):
            a.give(range(100_000 + start, 100_000 + start + 128))
        np.testing.assert_array_equal(np.array(loan.pages), pages_of(DOCUMENT))
        assert loan.release()
        assert made.returned()
        assert a.give(range(12 * 64)) == 12


def test_a_prompt_over_the_budget_evicts_nothing(path: Path) -> None:
    """R44: an oversize prompt is refused whole, and what was there stays."""
    with host(path, pages=12) as made, clients(made.path) as (a, b):
        a.give(DOCUMENT)
        assert b.give(range(50_000, 50_000 + 13 * 64)) == 0
        assert b.take(DOCUMENT)[0] == 700


def test_memory_stays_within_the_budget(path: Path) -> None:
    """However many documents come, the store's memory is its budget, and no more."""
    with host(path, pages=12) as made, clients(made.path) as (a, _):
        for start in range(0, 100_000, 1000):
            a.give(range(start, start + 700))
        taken = os.fstat(made.shelves.descriptor).st_blocks * 512
        assert taken <= 12 * GEOMETRY.page_bytes + 4096
        assert made.shelves.counts().used_bytes == 12 * GEOMETRY.page_bytes
        assert a.board.read().evicted_pages == 100 * 11 - 12


def test_a_batch_that_no_frame_holds_is_split(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R47: more keys than a frame takes are asked for in several, and none is a miss."""
    monkeypatch.setattr(frames, "MAX_KEYS", 4)
    with host(path) as made, clients(made.path) as (a, b):
        assert a.give(DOCUMENT) == 11
        assert b.take(DOCUMENT)[0] == 700
        keys = b.store.prompt(DOCUMENT).stored()
        assert b.store.held(keys) == 11
        loan = b.store.borrow(keys)
        assert len(loan.pages) == 11
        assert loan.release()


def test_holding_soon_tells_on_another_thread(pair: list[Replica]) -> None:
    """A scheduler's thread asks and goes on; the loan comes on a thread of the client's."""
    a, b = pair
    a.give(DOCUMENT)
    loan = soon(b.store, DOCUMENT)
    assert loan.tokens == 700
    assert loan.release()


def test_publishing_soon_stores_what_is_given_away(pair: list[Replica]) -> None:
    """Pages that a loop's thread gave away are there once the client had its turn."""
    a, b = pair
    prompt = a.store.prompt(DOCUMENT)
    assert a.store.publish_soon(prompt.stored(), pages_of(DOCUMENT))
    a.store.close()
    assert b.take(DOCUMENT)[0] == 700


def test_a_failing_write_stores_nothing(pair: list[Replica]) -> None:
    """R42: what an engine could not write is nobody's, and its slots are free again."""
    a, b = pair

    def write(place: int, page: Patterns) -> None:
        if place == 3:
            raise RuntimeError("a broken engine")

    assert a.store.publish(a.store.prompt(DOCUMENT).stored(), write) == 0
    assert b.take(DOCUMENT)[0] == 0
    assert b.give(DOCUMENT) == 11


def test_a_page_under_way_is_waited_for(pair: list[Replica]) -> None:
    """Who asks for a page while another writes it gets it, once, when it is there."""
    a, b = pair
    writing, proceed, found = threading.Event(), threading.Event(), []

    def write(place: int, page: Patterns) -> None:
        writing.set()
        assert proceed.wait(WAIT_S)
        page[...] = pages_of(DOCUMENT)[place]

    keys = a.store.prompt(DOCUMENT).stored()
    giving = threading.Thread(target=lambda: a.store.publish(keys, write))
    taking = threading.Thread(target=lambda: found.append(b.take(DOCUMENT)[0]))
    giving.start()
    assert writing.wait(WAIT_S)
    assert b.give(DOCUMENT) == 0
    taking.start()
    proceed.set()
    giving.join(WAIT_S)
    taking.join(WAIT_S)
    assert found == [700]


def test_a_replica_that_ends_leaves_nothing_reserved(store: Host) -> None:
    """R49: what a replica had borrowed or reserved is given back when it ends."""
    with clients(store.path) as (a, b):
        a.give(DOCUMENT)
        assert b.store.hold(b.store.prompt(DOCUMENT)).tokens == 700
        assert store.shelves.counts().loans == 1
        b.store.close()
        assert store.server.idle(WAIT_S, clients=1)
        assert store.shelves.counts().loans == 0


def test_a_store_that_goes_away_is_a_miss_until_it_is_back(path: Path) -> None:
    """Every call of a client whose store has ended says that nothing is there; the loan that was
    out says so too; and the next store is found by itself."""
    first = Host(path)
    with clients(first.path, 1) as (a,):
        a.give(DOCUMENT)
        loan = a.store.hold(a.store.prompt(DOCUMENT))
        first.close()
        a.connect(False)
        assert not loan.release()
        assert a.take(DOCUMENT)[0] == 0
        assert a.give(DOCUMENT) == 0
        assert a.store.held(a.store.prompt(DOCUMENT).pages) == 0
        with host(path) as again:
            a.connect()
            assert a.give(DOCUMENT) == 11
            assert a.take(DOCUMENT)[0] == 700
            assert again.shelves.counts().pages == 11


def test_a_replica_of_another_contract_is_refused(store: Host) -> None:
    """No page of one model is ever seen by another's replica."""
    other = msgspec.structs.replace(CONTRACT, weights="else")
    with pytest.raises(StoreLost, match="holds pages of the contract"):
        attach(store.path, other.digest, GEOMETRY)


@pytest.mark.parametrize(
    "sent", [b"\xff\xff\xff\xff", b"\x04\x00\x00\x00ABCD", frames.encode(frames.Held(keys=()))]
)
def test_strange_bytes_end_one_connection(store: Host, pair: list[Replica], sent: bytes) -> None:
    """A connection that says something else than Enter is closed, and others go on."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.connect(store.path)
        stranger.sendall(sent)
        assert stranger.recv(1) == b""
    assert pair[0].give(DOCUMENT) == 11


def test_only_its_user_may_connect(store: Host) -> None:
    """The socket is its user's alone, and the memory has no name that others could open."""
    assert stat.S_IMODE(os.stat(store.path).st_mode) == 0o600
    assert os.fstat(store.shelves.descriptor).st_nlink == 0


def test_a_frozen_store_delays_one_prompt(store: Host, pair: list[Replica]) -> None:
    """A store that does not answer is asked once; the prompts after that do not wait. What it
    lent, or lends too late, is given back."""
    a, b = pair
    a.give(DOCUMENT)
    loan = a.store.hold(a.store.prompt(DOCUMENT))
    with store.shelves._changed:
        assert b.store.hold(b.store.prompt(DOCUMENT), timeout_s=0.1).tokens == 0
        for _ in range(20):
            began_s = monotonic_s()
            assert b.store.hold(b.store.prompt(DOCUMENT), timeout_s=WAIT_S).tokens == 0
            assert monotonic_s() - began_s < WAIT_S
        assert loan.release()
    assert store.returned()
    assert a.take(DOCUMENT)[0] == 700
