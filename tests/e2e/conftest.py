"""Checkpoints and clusters for the tests that go through the whole product."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cluster import PDCTL, Cluster
from e2e.far import D_HOST, P_HOST, FarCluster
from e2e.faults import Ledger, Request
from e2e.mixed import BUFFER, Mixed
from e2e.prompts import exact_prompt
from e2e.way import Way
from namespaces import Network, network
from sshd import machines
from tiny import make_checkpoint

FAMILIES = ("llama", "qwen2", "qwen3")
THREE_CONTEXT = 2048
THREE_BUFFER_TOKENS = THREE_CONTEXT - 128
THREE_BUFFER = f'buffer_bytes = "{THREE_BUFFER_TOKENS // 64 * 128}KiB"'


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random checkpoint of each family."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(folder / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct, made by `pdctl demo-model` (quick when it is there already)."""
    done = subprocess.run(
        [PDCTL, "demo-model"], check=True, capture_output=True, text=True, timeout=600
    )
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def llama(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """p0 (prefill), d0 (decode) and o0 (ordinary) on the tiny Llama, for one test module."""
    with Cluster(tmp_path_factory.mktemp("llama"), checkpoints["llama"]) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def mixed(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mixed]:
    """Both engines in both roles; the buffer is a little smaller than the context."""
    folder = tmp_path_factory.mktemp("mixed")
    with Mixed(folder, checkpoints["llama"], "vp vd mp md", handoff=BUFFER) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def three(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mixed]:
    """All three engines: two prefill and two decode replicas, and a link from each prefill one."""
    options = {"linked": True, "context_length": THREE_CONTEXT, "handoff": THREE_BUFFER}
    folder = tmp_path_factory.mktemp("three")
    with Mixed(folder, checkpoints["llama"], "vp sp sd md", **options) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def ledger() -> Iterator[Ledger]:
    """What each fault led to; the whole table is printed at the end."""
    ledger = Ledger()
    yield ledger
    print(f"\n\n{ledger}")  # noqa: T201


@pytest.fixture(scope="session")
def far_cluster(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FarCluster]:
    """p0 and d0 on two machines behind SSH, for every fault of the session."""
    with (
        machines(P_HOST, D_HOST) as found,
        FarCluster(tmp_path_factory.mktemp("far"), checkpoints["llama"], found) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    """On which machines have addresses of their own."""
    if shutil.which("ss") is None:
        pytest.skip("needs ss, to prove that nothing listens")
    with network() as made:
        yield made


@pytest.fixture
def far(far_cluster: FarCluster) -> Iterator[FarCluster]:
    """The same, at rest and whole before and after the test."""
    far_cluster.settle()
    yield far_cluster
    far_cluster.settle()


@pytest.fixture(scope="session")
def prompt(checkpoints: dict[str, Path]) -> str:
    """Ten pages."""
    return exact_prompt(checkpoints["llama"], 600, seed=21)


@pytest.fixture(scope="session")
def expected(far_cluster: FarCluster, prompt: str) -> str:
    """What o0 alone makes of it."""
    return Request(far_cluster, prompt, path="o0", max_tokens=8).good().text


@pytest.fixture
def way(far: FarCluster, ledger: Ledger, prompt: str, expected: str) -> Way:
    """From p0 to d0."""
    return Way(far, far.link, "p0>d0", prompt, expected, ledger)
