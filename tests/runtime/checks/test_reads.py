"""What reading pages through NIXL needs of the replicas' environments."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import msgspec
import pytest
from topology.test_nixl import between, with_devices
from topology.texts import ORDINARY

from pdctl.engines.interface import Probe
from pdctl.errors import HandoffError
from pdctl.handoff.transport import nixl
from pdctl.runtime.checks.reads import judge_reads
from pdctl.topology.load import loads

FIT = Probe(engine_version="0.28.0", pdctl_version="1", python_version="3.11.9")
UNFIT = msgspec.structs.replace(FIT, nixl_problem="NIXL is missing in this environment")


def judged(text: str, **probes: Probe) -> list[tuple[str, str | None]]:
    topology, found = loads(text)
    assert topology is not None, found
    return [(d.code, d.replica) for d in judge_reads(topology, probes)]


def test_a_replica_whose_environment_lacks_nixl_is_refused_by_name() -> None:
    """R52: before it is launched; an ordinary replica needs none, nor does another transport."""
    text = between("vllm", "sglang") + ORDINARY.replace("mlx", "vllm")
    assert judged(text, p0=UNFIT, d0=FIT, o0=UNFIT) == [("host.nixl", "p0")]
    assert judged(text, p0=UNFIT, d0=UNFIT) == [("host.nixl", "p0"), ("host.nixl", "d0")]
    assert judged(text, d0=FIT) == []
    assert judged(text.replace('"nixl"', '"tcp"'), p0=UNFIT, d0=UNFIT) == []
    devices = with_devices(text.replace('"nixl"', '"auto"'), "p0", "d0")
    assert judged(devices, p0=UNFIT, d0=UNFIT) == []


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({}, "NIXL is missing in this environment"),
        ({"nixl-cu12": "1.4.9"}, "NIXL 1.4.9 is not supported; 1.5 and newer before 2 is"),
        ({"nixl-cu13": "2.0.0"}, "NIXL 2.0.0 is not supported; 1.5 and newer before 2 is"),
        ({"nixl-cu12": "1.5.1"}, "NIXL 1.5.1 does not load: no libucp.so.0"),
        ({"nixl-cu13": "1.12.0rc1"}, "NIXL 1.12.0rc1 does not load: no libucp.so.0"),
    ],
)
def test_a_problem_names_the_version_and_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], said: str
) -> None:
    """R52: missing, too old, too new, or not to be loaded on this host."""

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    def broken(module: str) -> None:
        raise ImportError("no libucp.so.0")

    monkeypatch.setattr(nixl, "version", version)
    monkeypatch.setattr(nixl, "import_module", broken)
    assert nixl.problem() == said
    with pytest.raises(HandoffError, match="NIXL"):
        nixl.NixlReach("p0")


def test_other_platforms_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl.sys, "platform", "darwin")
    assert nixl.problem() == "NIXL runs on Linux only"
