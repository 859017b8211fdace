"""vLLM's server as a replica starts it."""

from __future__ import annotations

import sys

import pytest

from pdctl.engines.vllm.server import keep_to_loopback


@pytest.mark.skipif(sys.platform != "linux", reason="an interface's name on Linux")
def test_process_groups_listen_on_loopback_alone() -> None:
    """R60: where the host's name leads to the network's address, gloo would listen there; who
    sets the interface in the topology's `env` keeps it."""
    environment: dict[str, str] = {}
    keep_to_loopback(environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "lo"}
    chosen = {"GLOO_SOCKET_IFNAME": "eth1"}
    keep_to_loopback(chosen)
    assert chosen == {"GLOO_SOCKET_IFNAME": "eth1"}
