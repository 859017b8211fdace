"""`transport = "nixl"`: which pairs can, what stays open, and what the plan says of it."""

from __future__ import annotations

import pytest
from topology.test_native import found, planned
from topology.texts import NATIVE, native_apart, native_between

from pdctl.topology.diagnostics import Severity
from pdctl.topology.load import loads
from pdctl.topology.model import Transport
from pdctl.topology.plan import derive

NIXL = NATIVE.replace('"native"', '"nixl"')


def between(prefill: str, decode: str) -> str:
    return native_between(prefill, decode, NIXL)


@pytest.mark.parametrize("prefill", ["vllm", "sglang"])
@pytest.mark.parametrize("decode", ["vllm", "sglang"])
def test_vllm_and_sglang_can_in_every_pair(prefill: str, decode: str) -> None:
    """S4, S7, S9: and the plan says what moves, and who moves it."""
    text = native_between(prefill, decode, NIXL)
    assert [d for d in found(text) if d.severity is Severity.ERROR] == []
    (pair,) = planned(text).pairs
    assert pair.transport is Transport.NIXL
    assert pair.reason == "nixl: written in the file; host memory, read by the decode replica"


@pytest.mark.parametrize(
    ("prefill", "decode", "name"), [("mlx", "vllm", "p0"), ("vllm", "mlx", "d0")]
)
def test_mlx_is_refused_by_name(prefill: str, decode: str, name: str) -> None:
    """R52: by pair, engine and replica, before anything is launched."""
    (problem,) = (d for d in found(native_between(prefill, decode, NIXL)) if "nixl" in d.code)
    assert problem.summary == (
        f'pair "p0" → "d0": transport "nixl" is impossible: mlx can\'t do it ({name})'
    )


def test_encryption_is_refused() -> None:
    """R52: UCX would carry the pages in the clear."""
    text = native_between("vllm", "vllm", NIXL).replace('"nixl"', '"nixl"\nencrypt = true')
    assert [d.field for d in found(text) if "nixl" in d.code] == ["handoff.encrypt"]


def test_two_hosts_are_warned_that_ucx_asks_for_no_key() -> None:
    """Whoever reaches its ports could read pages."""
    text = native_apart("vllm").replace('"native"', '"nixl"')
    (warning,) = (d for d in found(text) if "nixl" in d.code)
    assert (warning.severity, warning.code) == (Severity.WARNING, "topology.nixl_open")


@pytest.mark.parametrize(
    ("decode", "reason"),
    [
        ("sglang", "auto → tcp: pages lie in host memory"),
        ("mlx", "auto → tcp: mlx has no GPU path"),
    ],
)
def test_auto_says_why_it_is_tcp(decode: str, reason: str) -> None:
    (pair,) = planned(native_between("vllm", decode, NIXL).replace('"nixl"', '"auto"')).pairs
    assert (pair.transport, pair.reason) == (Transport.TCP, reason)


def test_each_replica_learns_how_the_pages_of_its_pairs_move() -> None:
    plan = planned(native_between("vllm", "sglang", NIXL))
    assert plan.transports("p0") == {"d0": Transport.NIXL}
    assert plan.transports("d0") == {"p0": Transport.NIXL}


def with_devices(text: str, *names: str) -> str:
    """Those replicas name the first device of their host."""
    for name in names:
        text = text.replace(f'name = "{name}"', f'name = "{name}"\ndevices = [0]')
    return text


def auto(prefill: str, decode: str, *named: str) -> str:
    return with_devices(between(prefill, decode).replace('"nixl"', '"auto"'), *named)


@pytest.mark.parametrize("prefill", ["vllm", "sglang"])
@pytest.mark.parametrize("decode", ["vllm", "sglang"])
def test_auto_is_nixl_between_two_devices_of_a_host(prefill: str, decode: str) -> None:
    """S4, S7, S9: and each replica learns that its pages lie there."""
    plan = planned(auto(prefill, decode, "p0", "d0"))
    (pair,) = plan.pairs
    assert (pair.transport, pair.on_device) == (Transport.NIXL, True)
    assert pair.reason == "auto → nixl: device memory, read by the decode replica"
    assert plan.on_device("p0")
    assert plan.on_device("d0")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (auto("vllm", "sglang", "p0"), "d0 names no device"),
        (auto("vllm", "sglang", "d0"), "p0 names no device"),
        (auto("vllm", "mlx", "p0"), "mlx has no GPU path"),
        (
            auto("vllm", "vllm", "p0", "d0").replace('"auto"', '"auto"\nencrypt = true'),
            "encrypt = true, and UCX has no TLS, encrypted (TLS 1.3)",
        ),
        (
            with_devices(native_apart("vllm").replace('"native"', '"auto"'), "p0", "d0"),
            'between hosts NIXL asks for no key; transport = "nixl" takes it all the same',
        ),
    ],
)
def test_auto_says_what_keeps_pages_off_the_devices(text: str, reason: str) -> None:
    """A pair takes TCP with the reason told, never without a word."""
    plan = planned(text)
    (pair,) = plan.pairs
    assert (pair.transport, pair.reason) == (Transport.TCP, f"auto → tcp: {reason}")
    assert not plan.on_device("p0")


def test_auto_is_tcp_where_an_environment_has_no_nixl() -> None:
    """As far as it was asked; the problem is in the reason."""
    topology, _ = loads(auto("vllm", "vllm", "p0", "d0"))
    assert topology is not None
    plan = derive(topology, no_nixl={"d0": "NIXL is missing in this environment"})
    (pair,) = plan.pairs
    assert pair.transport is Transport.TCP
    assert pair.reason == "auto → tcp: d0: NIXL is missing in this environment"


def test_a_file_that_asks_for_nixl_has_the_devices_memory_where_both_name_one() -> None:
    """Also between hosts: that is warned of, and taken."""
    (pair,) = planned(with_devices(between("vllm", "sglang"), "p0", "d0")).pairs
    assert pair.on_device
    assert pair.reason == "nixl: written in the file; device memory, read by the decode replica"


@pytest.mark.parametrize("named", ["p0", "d0"])
def test_a_device_and_host_memory_are_refused_by_name(named: str) -> None:
    """R52: before anything is launched."""
    text = with_devices(between("vllm", "sglang"), named)
    other = {"p0": "d0", "d0": "p0"}[named]
    (problem,) = (d for d in found(text) if "nixl" in d.code)
    assert problem.code == "topology.nixl_memories"
    assert problem.summary == (
        f'pair "p0" → "d0": transport "nixl" is impossible: {named} keeps KV on a device, and '
        f"{other} names none"
    )
