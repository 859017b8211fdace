"""`handoff.encrypt = true` through the whole product."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cluster import Cluster
from e2e.prompts import exact_prompt

pytestmark = pytest.mark.engine

TLS_ALERT = b"\x15"


@pytest.fixture(scope="module")
def encrypted(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("encrypted")
    with Cluster(folder, checkpoints["llama"], handoff="encrypt = true") as cluster:
        yield cluster


def test_text_under_tls_equals_that_of_one_engine(
    encrypted: Cluster, checkpoints: dict[str, Path]
) -> None:
    """Every page lands; a second request goes over the same connection."""
    for tokens in (51, 193, 700):
        prompt = exact_prompt(checkpoints["llama"], tokens, seed=3)
        before = encrypted.pair()
        alone = encrypted.completion(prompt, "o0", max_tokens=8, pdctl_cache=False).json()
        through = encrypted.completion(prompt, "p0>d0", max_tokens=8).json()
        assert through["choices"][0]["text"] == alone["choices"][0]["text"]
        assert encrypted.pair()["imported_tokens"] - before["imported_tokens"] == tokens - 1
    encrypted.wait("every request is over", encrypted.idle)


def test_a_stranger_on_the_data_port_hears_nothing_of_the_protocol(encrypted: Cluster) -> None:
    """Nothing of the protocol is said in the clear; the pair works on."""
    record = json.loads((encrypted.state / "pdctl" / encrypted.name / "cluster.json").read_text())
    plan = record["plan"]
    reasons = [pair["reason"] for pair in plan["pairs"]]
    assert all("TLS 1.3" in reason for reason in reasons), reasons
    port = next(r["data_port"] for r in plan["replicas"] if r["name"] == "p0")
    with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        try:
            heard = stranger.recv(4096)
        except ConnectionResetError:
            heard = b""
    assert heard[:1] in (b"", TLS_ALERT)
    assert encrypted.completion("1 2 3", "p0>d0", max_tokens=2).status_code == 200
