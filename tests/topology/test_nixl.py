"""`transport = "nixl"`: which pairs can, what stays open, and what the plan says of it."""

from __future__ import annotations

import pytest
from topology.test_native import found, planned
from topology.texts import NATIVE, native_apart, native_between

from pdctl.topology.diagnostics import Severity
from pdctl.topology.model import Transport

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
