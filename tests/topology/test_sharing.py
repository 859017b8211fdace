"""Which hosts have a page store, where it listens, and what is refused."""

from __future__ import annotations

import msgspec
import pytest
from engines.specs import CONTRACT
from topology.texts import GOOD, ORDINARY

from pdctl.topology.changes import Declared, changes
from pdctl.topology.load import loads
from pdctl.topology.model import Role
from pdctl.topology.plan import derive

HEAD = GOOD.partition("[[replicas]]")[0]
HOSTS = """
[hosts.gpu1]
ssh = "gpu1"
address = "192.168.1.20"

[hosts.studio]
ssh = "studio"
address = "192.168.1.30"
"""
SHARING = '[sharing]\nbuffer_bytes = "1GiB"\n'


def ordinary(name: str, host: str = "local") -> str:
    return ORDINARY.replace('"o0"', f'"{name}"') + f'host = "{host}"\n'


def declared(text: str, kept: Declared | None = None) -> Declared:
    topology, found = loads(text)
    assert topology is not None, found
    assert found == []
    plan = derive(topology, CONTRACT, kept=kept.plan if kept else None)
    return Declared(topology=topology, plan=plan, contract=CONTRACT)


ONE_HOST = HEAD + SHARING + ordinary("o0") + ordinary("o1")
TWO_HOSTS = HEAD + SHARING + HOSTS + ordinary("o0", "gpu1") + ordinary("o1", "studio")


def test_one_host_has_one_store_that_no_port_leads_to() -> None:
    """Two ordinary replicas of one host share through its store alone."""
    (store,) = declared(ONE_HOST).plan.stores
    assert (store.host, store.name, store.buffer_bytes) == ("local", "store-local", 1 << 30)
    assert store.data_port is None


def test_stores_of_two_hosts_have_ports_of_their_own() -> None:
    """Each is dialled at its host's address; a port is assigned once, and kept."""
    first = declared(TWO_HOSTS)
    gpu1, studio = first.plan.stores
    assert (gpu1.data_host, studio.data_host) == ("192.168.1.20", "192.168.1.30")
    assert gpu1.data_port in first.plan.ports("gpu1") - first.plan.ports("studio")
    assert studio.data_port != gpu1.data_port
    more = declared(TWO_HOSTS + ordinary("o2", "gpu1"), first)
    assert more.plan.stores == first.plan.stores
    assert not changes(first, more).refused


def test_a_host_of_pairs_alone_has_no_store() -> None:
    """Beside pairs the ordinary replicas share."""
    text = GOOD + SHARING + HOSTS + ordinary("o0", "gpu1") + ordinary("o1", "gpu1")
    assert [store.host for store in declared(text).plan.stores] == ["gpu1"]


@pytest.mark.parametrize(
    ("native", "users"), [(False, {"p0", "d0", "o0", "o1"}), (True, {"o0", "o1"})]
)
def test_who_uses_the_store_of_its_host(native: bool, users: set[str]) -> None:
    """Every replica on it, but for those whose engine has a handoff of its own."""
    plan = declared(GOOD + SHARING + ordinary("o0") + ordinary("o1")).plan
    replicas = [
        msgspec.structs.replace(r, native=native and r.role is not Role.BOTH) for r in plan.replicas
    ]
    assert {r.name for r in replicas if plan.store_of(r) is not None} == users


def test_without_sharing_there_is_no_store() -> None:
    assert declared(HEAD + ordinary("o0") + ordinary("o1")).plan.stores == ()


@pytest.mark.parametrize(
    ("old", "new", "code", "words"),
    [
        ('address = "192.168.1.30"', "", "no_address", 'host "studio": it has no address'),
        ("192.168.1.20", "127.0.0.1", "loopback_address", "loopback address 127.0.0.1"),
        ('"o0"', '"store-gpu1"', "reserved_name", "taken by a host's page store"),
    ],
)
def test_what_a_store_cannot_do_is_refused(old: str, new: str, code: str, words: str) -> None:
    """R59: the stores of two hosts dial each other, so each needs an address; and a name."""
    assert old in TWO_HOSTS
    _, found = loads(TWO_HOSTS.replace(old, new))
    assert [d.code for d in found] == [f"topology.{code}"]
    assert words in found[0].summary
    assert found[0].hint


def test_a_running_cluster_keeps_its_stores() -> None:
    """Sharing that would go on, off, or to another host is refused while it runs."""
    first = declared(ONE_HOST)
    topology, _ = loads(HEAD + SHARING + ordinary("o0"))
    assert topology is not None
    alone = Declared(topology=topology, plan=derive(topology, CONTRACT), contract=CONTRACT)
    assert [c.field for c in changes(first, alone).refused] == ["sharing"]
