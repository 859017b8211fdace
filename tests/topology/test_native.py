"""`transport = "native"`: what it is planned as, what it can't do, and what it leaves open."""

from __future__ import annotations

import pytest
from topology.texts import APART, GOOD, NATIVE, native_apart, native_between

from pdctl.topology.diagnostics import Diagnostic, Severity
from pdctl.topology.load import loads
from pdctl.topology.model import Transport
from pdctl.topology.plan import Plan, derive


def found(text: str) -> list[Diagnostic]:
    return loads(text)[1]


def planned(text: str) -> Plan:
    topology, diagnostics = loads(text)
    assert topology is not None, diagnostics
    return derive(topology)


@pytest.mark.parametrize(
    ("engine", "listening", "reason"),
    [
        ("vllm", ["p0", "d0"], "native: vLLM's own NixlConnector"),
        ("sglang", ["p0"], "native: SGLang's own NIXL backend"),
    ],
)
def test_a_native_pair_is_planned_with_side_ports(
    engine: str, listening: list[str], reason: str
) -> None:
    """S5, S8, U25: side ports are assigned like others; nobody listens for pages."""
    plan = planned(native_between(engine, engine))
    assert [(p.transport, p.reason) for p in plan.pairs] == [(Transport.NATIVE, reason)]
    assert [r.name for r in plan.replicas if r.side_port is not None] == listening
    assert all(r.native and r.data_port is None for r in plan.replicas)
    assert plan.replica("p0").sender_port == plan.replica("p0").side_port
    ports = [port for r in plan.replicas for port in (r.http_port, r.side_port) if port]
    assert len(set(ports)) == len(ports)
    assert set(ports) <= plan.ports("local")


def test_an_ordinary_replica_beside_a_native_pair_is_not_native() -> None:
    ordinary = NATIVE.split("[[replicas]]")[1].replace("p0", "o0").replace("prefill", "both")
    plan = planned(
        native_between("vllm", "vllm") + "[[replicas]]" + ordinary.replace("mlx", "vllm")
    )
    assert not plan.replica("o0").native
    assert plan.replica("o0").side_port is None


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (NATIVE, "native_engines", "mlx has no handoff of its own (p0)"),
        (native_between("vllm", "mlx"), "native_engines", "mlx has no handoff of its own (d0)"),
        (
            native_between("vllm", "sglang"),
            "native_engines",
            'pair "p0" → "d0": transport "native" is impossible: vllm and sglang have no '
            "handoff of their own in common",
        ),
        (
            native_between("vllm", "vllm").replace('"native"', '"native"\nencrypt = true'),
            "native_encrypt",
            "have no TLS",
        ),
        (
            native_between("vllm", "vllm").replace(
                '"native"', '"native"\non_failure = "recompute"'
            ),
            "native_recompute",
            'on_failure = "recompute" is impossible with transport = "native"',
        ),
        (
            native_apart("vllm", APART.replace('address = "10.0.0.2"\n', "")),
            "no_address",
            'replica "d0": prefill replica "p0" is on another host',
        ),
        (
            native_apart("sglang", APART.replace("10.0.0.2", "127.0.0.1")),
            "loopback_address",
            "its address 127.0.0.1 is loopback",
        ),
        (
            native_apart("vllm", APART.replace("10.0.0.1", "gpu1.example")),
            "native_address",
            'replica "p0": its address gpu1.example is a name',
        ),
    ],
)
def test_what_native_cannot_do_is_refused_by_name(text: str, code: str, words: str) -> None:
    """R52, R59: before any side effect, from the file alone."""
    errors = [d for d in found(text) if d.severity is Severity.ERROR]
    assert [d.code for d in errors] == [f"topology.{code}"]
    assert words in errors[0].summary
    assert errors[0].hint


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (
            native_between("vllm", "vllm").replace('"native"', '"native"\nbuffer_bytes = "1GiB"'),
            "unused_buffer",
            "buffer_bytes is unused",
        ),
        (
            native_between("vllm", "vllm").replace('name = "p0"', 'name = "p0"\ndata_port = 7000'),
            "unused_port",
            'replica "p0": data_port is unused',
        ),
        (
            native_between("sglang", "sglang").replace(
                'name = "d0"', 'name = "d0"\nside_port = 7000'
            ),
            "unused_port",
            'replica "d0": side_port is unused',
        ),
        (
            GOOD.replace('name = "p0"', 'name = "p0"\nside_port = 7000'),
            "unused_port",
            "no native handoff listens on this replica",
        ),
    ],
)
def test_what_means_nothing_with_it_is_warned(text: str, code: str, words: str) -> None:
    warned = [d for d in found(text) if d.code == f"topology.{code}"]
    assert [d.severity for d in warned] == [Severity.WARNING]
    assert words in warned[0].summary


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_side_channel_on_a_network_is_warned_at_both_ends(engine: str) -> None:
    """R60: who reaches it reads and writes the KV cache; on one machine it keeps to loopback."""
    open_ends = [d for d in found(native_apart(engine)) if d.code == "topology.native_open"]
    assert [(d.severity, d.replica) for d in open_ends] == [
        (Severity.WARNING, "p0"),
        (Severity.WARNING, "d0"),
    ]
    assert "10.0.0.1" in open_ends[0].summary
    assert [planned(native_apart(engine)).replica(r).data_host for r in ("p0", "d0")] == [
        "10.0.0.1",
        "10.0.0.2",
    ]
    local = native_between(engine, engine)
    assert not [d for d in found(local) if d.code == "topology.native_open"]
    assert {r.data_host for r in planned(local).replicas} == {"127.0.0.1"}
