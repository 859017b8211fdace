"""What the engines' own handoffs need of their replicas' environments."""

from __future__ import annotations

import msgspec
import pytest
from topology.texts import ORDINARY, native_between

from pdctl.engines.interface import Probe
from pdctl.runtime.checks.natives import judge_native
from pdctl.topology.diagnostics import Diagnostic
from pdctl.topology.load import loads

HAS = Probe(engine_version="0.28.0", pdctl_version="1", python_version="3.11.9", has_nixl=True)
LACKS = msgspec.structs.replace(HAS, has_nixl=False)
OTHER = msgspec.structs.replace(HAS, engine_version="0.32.0")


def judged(text: str, **probes: Probe) -> list[Diagnostic]:
    topology, found = loads(text)
    assert topology is not None, found
    return judge_native(topology, probes)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_native_replica_without_nixl_is_refused_by_name(engine: str) -> None:
    """R52: before it is launched; what did not answer is told elsewhere, and an ordinary replica
    needs none."""
    text = native_between(engine, engine) + ORDINARY.replace("mlx", engine)
    found = judged(text, p0=LACKS, d0=HAS, o0=LACKS)
    assert [(d.code, d.replica) for d in found] == [("host.no_nixl", "p0")]
    assert "needs" in found[0].summary
    assert judged(text, d0=HAS) == []


@pytest.mark.parametrize(("engine", "codes"), [("vllm", ["host.native_version"]), ("sglang", [])])
def test_two_versions_of_vllm_do_not_shake_hands(engine: str, codes: list[str]) -> None:
    """Its connector would refuse the other's at the first request."""
    found = judged(native_between(engine, engine), p0=HAS, d0=OTHER)
    assert [d.code for d in found] == codes
    assert all("0.28.0 and 0.32.0" in d.summary for d in found)


def test_other_transports_need_none() -> None:
    text = native_between("vllm", "vllm").replace('"native"', '"tcp"')
    assert judged(text, p0=LACKS, d0=msgspec.structs.replace(OTHER, has_nixl=False)) == []
