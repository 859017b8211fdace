"""Servers beside a cluster are the engines' own, alike but for what is compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest


def option(server: Any, name: str) -> str:
    return str(server._argv[server._argv.index(name) + 1])


def test_vllms_own_handoff_has_two_ends_on_ports_of_their_own(site: Callable[..., Any]) -> None:
    """Each on its device; otherwise they are started as the ordinary one is."""
    from gpu_engines import ordinary, vllm_nixl

    sender, receiver = vllm_nixl(site(devices=(0, 1)))
    plain = ordinary(site(), "vllm")
    assert (sender.name, receiver.name) == ("vnp", "vnd")
    ports = {each._env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for each in (sender, receiver)}
    assert len(ports) == 2
    assert [each._env["CUDA_VISIBLE_DEVICES"] for each in (sender, receiver)] == ["0", "1"]
    for each in (sender, receiver):
        assert json.loads(option(each, "--kv-transfer-config"))["kv_connector"] == "NixlConnector"
        same = ("--kv-cache-memory-bytes", "--block-size", "--max-num-seqs", "--max-model-len")
        assert [option(each, name) for name in same] == [option(plain, name) for name in same]
    assert "--kv-transfer-config" not in plain._argv


@pytest.mark.parametrize("graphs", [False, True])
def test_ordinary_servers_compute_as_the_site_says(site: Callable[..., Any], graphs: bool) -> None:
    from gpu_engines import ordinary

    vllm, sglang, mlx = (ordinary(site(graphs=graphs), e) for e in ("vllm", "sglang", "mlx"))
    assert ("--no-enforce-eager" in vllm._argv) is graphs
    assert ("--disable-cuda-graph" in sglang._argv) is not graphs
    assert option(sglang, "--max-total-tokens") == "65536"
    assert option(mlx, "--model") == str(site().model)


def test_two_ordinary_servers_are_asked_by_turns(site: Callable[..., Any]) -> None:
    """A load has one alone, and both; one that did not come up is left away."""
    import gpu_load

    made = list(gpu_load.servers(site(), ["ordinary"], ["vllm", "sglang"]))
    names = [server.name for server in made]
    assert names == ["vllm", "vllm second", "sglang", "sglang second"]
    assert len({server._log for server in made}) == 4
    up = {server.name: server for server in made if server.name != "sglang second"}
    found = gpu_load.ways(SimpleNamespace(servers=up, targets={}))
    assert [way.name for way in found] == ["ordinary vllm", "ordinary vllm x2", "ordinary sglang"]
