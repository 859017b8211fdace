"""Page stores of two hosts over real SSH, each with an address of its own, and the cable between
them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.over_ssh import OverSsh, apart
from e2e.stores import DOCUMENT_TOKENS, ask, document, publish, sharing_of, store, takes
from namespaces import Network

from pdctl.handoff.store.interface import HOLD_S
from pdctl.topology.model import PAGE_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.ssh, pytest.mark.slow]

PAGES = -(-DOCUMENT_TOKENS // PAGE_TOKENS)
ALONE_S = 5.0
"""For which a store that did not answer is left alone."""
COMPUTED_S = 10.0
"""Far more than a prompt of the tiny model takes."""


@pytest.fixture(scope="module")
def hosts(
    net: Network, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OverSsh]:
    """Router here, o0 on gpu1, o1 on studio; no replica of this machine, so no store."""
    with apart(net, "gpu1", "studio") as (far, addresses):
        where = {"o0": "gpu1", "o1": "studio"}
        folder = tmp_path_factory.mktemp("stores")
        made = OverSsh(folder, checkpoints["llama"], far, where, addresses)
        made.edit("[router]", f"{sharing_of(100)}[router]")
        with made:
            yield made


def moved(hosts: OverSsh, source: str, target: str) -> tuple[int, int]:
    """Pages that one store has sent and the other was brought."""
    return store(hosts, source)["sent_pages"], store(hosts, target)["brought_pages"]


def test_pages_of_the_other_host_are_brought_once(hosts: OverSsh) -> None:
    """o1 computes the last token of what o0 was asked; its host holds the pages from then on, and
    o0 gets o1's in the same way."""
    assert {one["host"] for one in hosts.ps()["stores"]} == {"gpu1", "studio"}
    for giver, taker, source, target in (
        ("o0", "o1", "gpu1", "studio"),
        ("o1", "o0", "studio", "gpu1"),
    ):
        text = document()
        before = moved(hosts, source, target)
        expected = publish(hosts, text, giver, DOCUMENT_TOKENS)
        assert ask(hosts, text, taker) == (expected, DOCUMENT_TOKENS - 1)
        after = (before[0] + PAGES, before[1] + PAGES)
        hosts.wait(
            "its pages are counted",
            lambda way=(source, target), after=after: moved(hosts, *way) == after,
        )
        assert ask(hosts, text, taker)[1] == DOCUMENT_TOKENS - 1
        assert moved(hosts, source, target) == after


def test_a_cut_link_is_a_miss_and_then_it_works_again(hosts: OverSsh, net: Network) -> None:
    """The first request waits for the other store as long as a prompt may, the next ones for
    nothing; all are computed. With the cable back pages are brought again, by the same
    processes."""
    pids = {one["name"]: one["pid"] for one in (*hosts.ps()["stores"], *hosts.ps()["replicas"])}
    text = document()
    expected = publish(hosts, text, "o0", DOCUMENT_TOKENS)
    with net.unplugged("gpu1"):
        began_s = time.monotonic()
        answer, cached = ask(hosts, text, "o1")
        assert (answer, cached < PAGE_TOKENS) == (expected, True)
        assert time.monotonic() - began_s < HOLD_S + COMPUTED_S
        missed = hosts.replica("o1")["missed_pages"]
        assert ask(hosts, document(), "o1")[1] < PAGE_TOKENS
        assert hosts.replica("o1")["missed_pages"] > missed
    hosts.wait("o0 is there", lambda: hosts.replica("o0")["state"] == "ready")
    hosts.wait("pages again", lambda: takes(hosts, document(), "o0", "o1"), ALONE_S + 30)
    now = {one["name"]: one["pid"] for one in (*hosts.ps()["stores"], *hosts.ps()["replicas"])}
    assert now == pids
