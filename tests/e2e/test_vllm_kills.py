"""vLLM replicas killed around a handoff: what clients are told, who goes on, and who comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from e2e.faults import Request
from e2e.mixed import Mixed, runs
from engines.vllm_replicas import needs_vllm
from tiny import digits

pytestmark = [pytest.mark.engine, needs_vllm]

LONG_TOKENS = 8000
"""125 pages, 16 MB: what sockets hold of it is not the whole, once decode fills blocks slowly."""
OTHER = digits(150, 9)
PAIRS = ("vp>vd", "vp>md", "mp>vd")
RECOMPUTE = 'on_failure = "recompute"'


def sent_slowly(cluster: Mixed, path: str, prompt: str) -> Request:
    """A request whose pages are on their way to vd."""
    cluster.wait("no handoff is active", lambda: cluster.replica("vd")["handoffs_active"] == 0)
    request = Request(cluster, prompt, path=path)
    cluster.wait("the handoff is active", lambda: cluster.replica("vd")["handoffs_active"] == 1)
    return request


def test_killed_workers_fail_their_requests_by_name_and_come_back(mixed: Mixed) -> None:
    """U10, U14, U26, U29, U35, R61: before, during and after a handoff, on either side; nothing
    hangs, the other engine lives on, and each pair is in rotation again after its canary."""
    cluster, prompt = mixed, digits(LONG_TOKENS, 8)
    processes = {name: cluster.processes(name) for name in ("vp", "vd")}
    streaming = Request(cluster, OTHER, path="vp>md", max_tokens=1500)
    assert streaming.begun.wait(30)
    with cluster.faults.of("write is slow"):
        sending = sent_slowly(cluster, "vp>vd", prompt)
        killed_s = time.monotonic()
        cluster.kill_worker("vp")
    # whichever is known first: that vp ended, or that vd lost its connection
    sending.told('replica "v', since_s=killed_s)
    assert sending.error is not None
    assert sending.error["code"] in ("replica_lost", "peer_lost")
    Request(cluster, OTHER, path="vp>vd").told("vp")
    Request(cluster, OTHER, path="mp>vd").good()
    assert cluster.replica("vd")["pid"] == processes["vd"][0].pid
    streaming.good()

    with cluster.faults.of("write is slow"):
        receiving = sent_slowly(cluster, "mp>vd", prompt)
        # alone: it imports nothing, and so begins at once
        writing = Request(cluster, OTHER, path="vd", max_tokens=7000, ignore_eos=True)
        assert writing.begun.wait(30)
        killed_s = time.monotonic()
        processes["vd"][0].kill()  # as it is known: to ask for its number takes its time here
        receiving.told('decode replica "vd"', since_s=killed_s)
        writing.told('replica "vd"', since_s=killed_s)
    cluster.wait("every pair ready again", cluster.ready, 120)
    check_back(cluster, processes)


def check_back(cluster: Mixed, before: dict[str, list[psutil.Process]]) -> None:
    """As good as new, and nothing of what was killed is left, vLLM's other processes included."""
    for name, processes in before.items():
        assert len(processes) >= 3
        assert [process for process in processes if runs(process)] == []
        assert cluster.replica(name)["restarts"] == 1
    expected = Request(cluster, OTHER, path="vd", max_tokens=8).good().text
    for path in PAIRS:
        found = Request(cluster, OTHER, path=path, max_tokens=8).good().text
        assert found.strip() == expected.strip()
    cluster.wait("nothing in flight", cluster.idle, 10)


@pytest.fixture(scope="module")
def recomputing(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mixed]:
    folder = tmp_path_factory.mktemp("recomputing")
    with Mixed(folder, checkpoints["llama"], "vp vd mp", handoff=RECOMPUTE) as cluster:
        yield cluster


@pytest.mark.parametrize("path", ["mp>vd", "vp>vd"])
def test_decode_computes_the_prompt_itself_and_says_so(recomputing: Mixed, path: str) -> None:
    """R72: prefill is killed in a handoff, vLLM's by the death of its data plane, which it does not
    outlive. vLLM's had answered, MLX's had not; the text is what vd computes alone, and the header
    and both counters tell who made it."""
    cluster, prefill = recomputing, path.partition(">")[0]
    prompt, before = digits(LONG_TOKENS, ord(path[0])), cluster.replica("vd")
    with cluster.faults.of("write is slow"):
        request = sent_slowly(cluster, path, prompt)
        if prefill == "vp":
            cluster.wait("vp has answered", lambda: cluster.replica("vp")["requests_active"] == 0)
            cluster.kill_plane("vp")
        else:
            cluster.kill("mp")
    request.good()
    assert request.text == Request(cluster, prompt, path="vd").good().text
    assert request.path == "vd"
    after = cluster.replica("vd")
    assert after["handoffs_failed"] == before["handoffs_failed"] + 1
    # canaries of what restarts meanwhile import a few
    assert after["imported_tokens"] - before["imported_tokens"] < LONG_TOKENS
    metrics = cluster.http.get("/metrics").text
    told = [line for line in metrics.splitlines() if line.startswith("pdctl_router_failures")]
    assert any(f'replica="{name}"' in line for line in told for name in (prefill, "vd")), told
