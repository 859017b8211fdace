"""Plans: ports, pairs, addresses and budgets, derived without I/O."""

from __future__ import annotations

import pytest
from topology.texts import GOOD, ORDINARY, edited

from pdctl.errors import HostError
from pdctl.topology.contract import Attention, Contract, Positions
from pdctl.topology.load import loads
from pdctl.topology.model import ComputeDtype, Dtype, Topology, Transport
from pdctl.topology.plan import FIRST_PORT, LAST_PORT, Plan, derive


def topology(text: str) -> Topology:
    read, found = loads(text)
    assert read is not None, found
    return read


def all_ports(plan: Plan) -> list[int]:
    ports = [*plan.agent_ports.values()]
    for replica in plan.replicas:
        ports += [p for p in (replica.http_port, replica.data_port) if p is not None]
    return ports


def test_ports_are_unique_stable_and_in_range() -> None:
    """U25: nothing collides; the same file gives the same ports, another name gives others."""
    plan = derive(topology(GOOD + ORDINARY))
    ports = all_ports(plan)
    assert len(set(ports)) == len(ports) == 1 + 3 + 1
    assert all(FIRST_PORT <= port <= LAST_PORT for port in ports)
    assert derive(topology(GOOD + ORDINARY)) == plan
    assert all_ports(derive(topology(edited('"studio"', '"other"') + ORDINARY))) != ports


def test_declared_and_busy_ports_are_not_assigned() -> None:
    """What the file names, and what listens already, is taken."""
    first = derive(topology(GOOD))
    declared = first.replicas[1].http_port
    text = edited('name = "d0"', f'name = "d0"\nhttp_port = {first.agent_ports["local"]}')
    moved = derive(topology(text), busy={"local": frozenset({declared})})
    assert moved.replica("d0").http_port == first.agent_ports["local"]
    assert declared not in all_ports(moved)
    assert len(set(all_ports(moved))) == len(all_ports(moved))


def test_no_free_port_is_an_error() -> None:
    with pytest.raises(HostError, match="is free"):
        derive(topology(GOOD), busy={"local": frozenset(range(FIRST_PORT, LAST_PORT + 1))})


def test_pairs_are_every_prefill_with_every_decode() -> None:
    """Ordinary replicas are in no pair; the transport says why it was chosen."""
    text = (
        GOOD
        + ORDINARY
        + GOOD.partition("[[replicas]]")[2]
        .join(["[[replicas]]", ""])
        .replace('"p0"', '"p1"')
        .replace('"d0"', '"d1"')
    )
    plan = derive(topology(text))
    assert [pair.path for pair in plan.pairs] == ["p0>d0", "p0>d1", "p1>d0", "p1>d1"]
    assert {pair.transport for pair in plan.pairs} == {Transport.TCP}
    assert plan.pairs[0].reason == "auto → tcp: mlx has no GPU path"


def test_only_senders_get_a_data_port() -> None:
    plan = derive(topology(GOOD + ORDINARY))
    assert [r.data_port is not None for r in plan.replicas] == [True, False, False]


def test_the_data_host_is_loopback_unless_a_peer_is_elsewhere() -> None:
    """U15: what is advertised is what peers can dial."""
    assert derive(topology(GOOD)).replica("p0").data_host == "127.0.0.1"
    apart = edited('name = "d0"', 'name = "d0"\nhost = "b"') + (
        '[hosts.b]\nssh = "b"\n[hosts.local]\naddress = "192.168.1.2"\n'
    )
    assert derive(topology(apart)).replica("p0").data_host == "192.168.1.2"
    own = apart.replace('name = "p0"', 'name = "p0"\naddress = "10.0.0.7"')
    assert derive(topology(own)).replica("p0").data_host == "10.0.0.7"
    assert derive(topology(own)).agent_ports.keys() == {"local", "b"}


def test_ports_belong_to_the_host_that_listens_on_them() -> None:
    """The router's host has its bind and the near ends of the routes to other hosts."""
    apart = edited('name = "d0"', 'name = "d0"\nhost = "b"') + (
        '[hosts.b]\nssh = "b"\n[hosts.local]\naddress = "192.168.1.2"\n'
    )
    plan = derive(topology(apart))
    p0, d0 = plan.replica("p0"), plan.replica("d0")
    near = {8000, plan.agent_ports["local"], p0.http_port, p0.data_port, d0.route_port}
    assert plan.ports("local") == near
    assert plan.ports("b") == {plan.agent_ports["b"], d0.http_port}
    assert plan.ports("elsewhere") == frozenset()


def test_compute_dtype_defaults_to_the_pages() -> None:
    text = edited('name = "d0"', 'name = "d0"\ncompute_dtype = "float32"')
    plan = derive(topology(text))
    assert plan.replica("p0").compute_dtype is ComputeDtype.FLOAT16
    assert plan.replica("d0").compute_dtype is ComputeDtype.FLOAT32


def contract(layers: int) -> Contract:
    return Contract(
        weights="w",
        tokenizer="t",
        chat_template="c",
        attention=Attention(kind="full", layers=layers, kv_heads=8, head_dim=128),
        positions=Positions(rope_theta=1e6, max_positions=65536, context_length=2048),
        dtype=Dtype.FLOAT16,
    )


def test_the_budget_is_two_contexts_and_at_least_half_a_gibibyte() -> None:
    """DESIGN §6: 36 layers of 8 × 128 take 147,456 bytes per token (Qwen3-8B)."""
    large, small = contract(36), contract(1)
    assert large.token_kv_bytes == 147_456
    assert derive(topology(GOOD), large).buffer_bytes == 2 * 2048 * 147_456
    assert derive(topology(GOOD), small).buffer_bytes == 512 << 20
    assert derive(topology(GOOD)).buffer_bytes is None
    declared = topology(edited("timeout_s = 30", 'buffer_bytes = "1GiB"'))
    assert derive(declared, large).buffer_bytes == 1 << 30
    assert derive(topology(GOOD), large).contract_digest == large.digest
