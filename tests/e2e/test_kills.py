"""Replicas killed around a transfer: a clear answer, nothing hangs, and they come back."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx2 as httpx
import pytest
from e2e.cluster import Cluster
from e2e.prompts import exact_prompt

pytestmark = pytest.mark.engine

ANSWER_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def model_dir(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["llama"]


class Call:
    """One completion in its own thread, with the moment of its answer."""

    def __init__(self, cluster: Cluster, prompt: str, max_tokens: int) -> None:
        self.response: httpx.Response | None = None
        self.ended_s = 0.0
        self._thread = threading.Thread(target=self._run, args=(cluster, prompt, max_tokens))
        self._thread.start()

    def _run(self, cluster: Cluster, prompt: str, max_tokens: int) -> None:
        self.response = cluster.completion(prompt, "p0>d0", max_tokens=max_tokens)
        self.ended_s = time.monotonic()

    def join(self) -> httpx.Response:
        self._thread.join(60)
        assert self.response is not None, "the request hangs"
        return self.response


def check_failed(call: Call, killed_s: float, leg: str, replica: str) -> None:
    """An OpenAI error object, 502 or 503, that names the leg and the replica, in time."""
    response = call.join()
    assert response.status_code in (502, 503), response.text
    error = response.json()["error"]
    assert leg in error["message"]
    assert replica in error["message"]
    assert call.ended_s - killed_s < ANSWER_WITHIN_S


def check_recovers(cluster: Cluster, model_dir: Path, old_pid: int, replica: str) -> None:
    cluster.wait("a new process", lambda: cluster.replica(replica)["pid"] not in (None, old_pid))
    cluster.wait("every pair ready again", cluster.ready)
    assert cluster.replica(replica)["restarts"] >= 1
    prompt = exact_prompt(model_dir, 80, seed=9)
    alone = cluster.completion(prompt, "o0", max_tokens=8).json()["choices"][0]["text"]
    answer = cluster.completion(prompt, "p0>d0", max_tokens=8)
    assert answer.json()["choices"][0]["text"] == alone
    cluster.wait("nothing in flight", cluster.idle)


@pytest.mark.parametrize(("replica", "leg"), [("p0", "prefill"), ("d0", "decode")])
def test_killed_before_a_request(llama: Cluster, model_dir: Path, replica: str, leg: str) -> None:
    """R61, U35: a dead replica fails fast by name, is started again, and serves again."""
    pid = llama.kill(replica)
    killed_s = time.monotonic()
    check_failed(Call(llama, exact_prompt(model_dir, 70, seed=5), 4), killed_s, leg, replica)
    check_recovers(llama, model_dir, pid, replica)


@pytest.mark.parametrize(("replica", "leg"), [("p0", "prefill"), ("d0", "decode")])
def test_killed_during_a_request(llama: Cluster, model_dir: Path, replica: str, leg: str) -> None:
    """U14, U10: killed while its handoff is active; the other engine lives on."""
    other = {"p0": "d0", "d0": "p0"}[replica]
    other_pid = llama.replica(other)["pid"]
    call = Call(llama, exact_prompt(model_dir, 1900, seed=6), 64)
    llama.wait("the handoff is active", lambda: llama.replica("p0")["handoffs_active"] == 1)
    pid = llama.kill(replica)
    check_failed(call, time.monotonic(), leg, replica)
    assert llama.replica(other)["pid"] == other_pid
    check_recovers(llama, model_dir, pid, replica)


def test_decode_killed_after_the_transfer(llama: Cluster, model_dir: Path) -> None:
    """U29, R63: a stream that breaks in mid-answer ends with an error event, never silently."""
    prompt = exact_prompt(model_dir, 90, seed=7)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1500, "stream": True}
    lines = []
    with llama.http.stream(
        "POST", "/v1/completions", json=body, headers={"x-pdctl-path": "p0>d0"}
    ) as answer:
        assert answer.status_code == 200
        stream = answer.iter_lines()
        lines.append(next(stream))
        pid = llama.kill("d0")
        lines.extend(stream)
    assert "data: [DONE]" not in lines
    assert any('"error"' in line and "d0" in line for line in lines)
    check_recovers(llama, model_dir, pid, "d0")


def test_prefill_killed_after_the_transfer(llama: Cluster, model_dir: Path) -> None:
    """Once its pages are over, a prefill replica's death concerns nobody's stream."""
    prompt = exact_prompt(model_dir, 90, seed=8)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 200, "stream": True}
    with llama.http.stream(
        "POST", "/v1/completions", json=body, headers={"x-pdctl-path": "p0>d0"}
    ) as answer:
        stream = answer.iter_lines()
        next(stream)
        pid = llama.kill("p0")
        lines = [line for line in stream if line]
    assert lines[-1] == "data: [DONE]"
    check_recovers(llama, model_dir, pid, "p0")
