"""What is launched together is stopped together, also where some of it never came up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PDCTL = """
import sys, time
from pathlib import Path
verb, path = sys.argv[1], Path(sys.argv[2])
with path.with_suffix("." + verb).open("a") as told:
    told.write(path.read_text())
if verb == "up" and "broken" in path.name:
    print("error: not ready within 9 s")
    sys.exit(5)
if verb == "up" and "slow" in path.name:
    time.sleep(60)
"""
"""Notes each call beside its topology."""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Which clusters have heard that verb."""
    import gpu_cluster

    monkeypatch.setattr(gpu_cluster, "PDCTL", [sys.executable, "-c", PDCTL])
    monkeypatch.setattr(gpu_cluster, "running", lambda path: f"target of {Path(path).stem}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return lambda verb: sorted(path.stem for path in tmp_path.glob(f"*.{verb}"))


def systems(*names: str) -> list[Any]:
    from gpu_cluster import System, members

    return [System(name, members("vp vd")) for name in names]


def test_one_that_fails_leaves_the_rest_and_is_told(
    site: Callable[..., Any], told: Callable[[str], list[str]]
) -> None:
    """Its error stands beside its name; both are taken down."""
    from gpu_cluster import fleet

    with fleet(site(), systems("whole", "broken")) as started:
        assert started.targets == {"whole": "target of whole"}
        assert set(started.failed) == {"broken"}
        assert "error: not ready within 9 s" in started.failed["broken"]
    assert told("down") == ["broken", "whole"]


def test_an_interrupted_launch_is_ended_before_its_cluster_is_taken_down(
    site: Callable[..., Any], told: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the block ends: the launch is not left to go on by itself."""
    import gpu_cluster

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    server = type("Dead", (), {"wait": interrupted, "name": "vllm"})()
    fleet = gpu_cluster.Fleet(site())
    with pytest.raises(KeyboardInterrupt):
        fleet.start(systems("slow"), [server], 60.0)
    fleet.stop()
    assert [process.poll() is None for process in fleet._launching] == [False]
    assert told("down") == ["slow"]


def test_a_running_cluster_takes_another_policy_under_the_address_it_has(
    site: Callable[..., Any],
    told: Callable[[str], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dataclasses import replace
    from types import SimpleNamespace

    import gpu_cluster

    bound = SimpleNamespace(plan=SimpleNamespace(router_bind="127.0.0.1:4321"))
    monkeypatch.setattr(gpu_cluster, "running", lambda path: bound)
    (system,) = systems("whole")
    with gpu_cluster.fleet(site(), [system]) as started:
        started.apply(replace(system, policy="prefix"))
        heard = (tmp_path / "whole.up").read_text()
    assert heard.count("schema = 1") == 2
    assert 'bind = "127.0.0.1:4321"\npolicy = "prefix"' in heard
