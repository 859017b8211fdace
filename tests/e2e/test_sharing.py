"""Two ordinary MLX replicas of one cluster that share prefix KV, through the user's commands."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e.cluster import Cluster
from e2e.prompts import exact_prompt

pytestmark = pytest.mark.engine

PAGES = 36
SHARING = f'[sharing]\nbuffer_bytes = "{PAGES * 128}KiB"\n'
"""The tiny model's pages are of 128 KiB: three documents, and not four."""


@pytest.fixture(scope="module")
def model_dir(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["llama"]


@pytest.fixture(scope="module")
def shared(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """o0 and o1; when it is down, so is its page store."""
    folder = tmp_path_factory.mktemp("shared")
    roles = {"o0": "both", "o1": "both"}
    with Cluster(folder, model_dir, roles=roles, handoff=SHARING) as cluster:
        yield cluster
        pid = store(cluster)["pid"]
    assert not psutil.pid_exists(pid)


def store(cluster: Cluster) -> dict[str, Any]:
    return dict(cluster.ps()["stores"][0])


def ask(cluster: Cluster, prompt: str, path: str, **more: Any) -> tuple[str, int]:
    """(text, how many of the prompt's tokens were not computed)."""
    answer = cluster.completion(prompt, path, max_tokens=8, **more)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    details = body["usage"].get("prompt_tokens_details") or {}
    return body["choices"][0]["text"], details.get("cached_tokens", 0)


def publish(cluster: Cluster, prompt: str, path: str, tokens: int, **more: Any) -> str:
    """Asks for a prompt that is new, and waits until the replica has stored it."""
    stored = cluster.replica(path)["stored_pages"] + -(-tokens // 64)
    text, _ = ask(cluster, prompt, path, **more)
    cluster.wait("its pages", lambda: cluster.replica(path)["stored_pages"] >= stored)
    return text


def test_a_document_is_computed_once(shared: Cluster, model_dir: Path) -> None:
    """What o0 computed, o1 takes: all but the last token of the same prompt, and every shared
    full page of another question; the text is what it is without sharing."""
    document = exact_prompt(model_dir, 700, seed=1)
    expected = publish(shared, document, "o0", 700)
    assert ask(shared, document, "o1") == (expected, 699)
    question = document[: len(document) // 2] + exact_prompt(model_dir, 60, seed=2)
    text, cached = ask(shared, question, "o1")
    assert cached >= 320
    assert text == ask(shared, question, "o0", pdctl_cache=False)[0]
    seen = shared.replica("o1")
    assert seen["reused_tokens"] >= 699
    assert seen["shared_bytes"] >= 11 * 128 * 1024
    text = shared.http.get("/metrics").text
    assert 'pdctl_reused_tokens{replica="o1"' in text


def test_salted_requests_share_with_their_own_tenant_alone(
    shared: Cluster, model_dir: Path
) -> None:
    """R48: `cache_salt` goes through the router, and neither the store nor a replica's own
    prefixes cross it."""
    prompt = exact_prompt(model_dir, 300, seed=3)
    publish(shared, prompt, "o0", 300, cache_salt="a")
    assert ask(shared, prompt, "o1", cache_salt="b")[1] == 0
    assert ask(shared, prompt, "o0")[1] < 64
    assert ask(shared, prompt, "o1", cache_salt="a")[1] == 299


def test_the_store_stays_within_its_budget(shared: Cluster, model_dir: Path) -> None:
    """Twice as many documents as it holds: the oldest go, and its process has the memory of
    its budget."""
    for seed in range(10, 16):
        publish(shared, exact_prompt(model_dir, 700, seed), "o0", 700)
    seen = store(shared)
    assert seen["pages"] <= PAGES
    assert seen["used_bytes"] <= seen["budget_bytes"] == PAGES * 128 * 1024
    assert shared.replica("o0")["evicted_pages"] > 0
    mapped = psutil.Process(seen["pid"]).memory_info().shared
    assert mapped < 128 << 20


def test_the_store_is_killed_in_mid_traffic(shared: Cluster, model_dir: Path) -> None:
    """Requests go on as misses; the store is started again, and pages are shared again."""
    prompts = [exact_prompt(model_dir, 200, seed) for seed in range(30, 42)]
    failed: list[str] = []
    begun = threading.Event()

    def traffic(path: str) -> None:
        for prompt in prompts:
            answer = shared.completion(prompt, path, max_tokens=4)
            begun.set()
            if answer.status_code != 200:
                failed.append(answer.text)

    threads = [threading.Thread(target=traffic, args=(path,)) for path in ("o0", "o1")]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    pid = store(shared)["pid"]
    os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert failed == []
    shared.wait("another store", lambda: store(shared)["state"] == "ready")
    again = store(shared)
    assert again["pid"] != pid
    assert again["restarts"] == 1
    tries = (exact_prompt(model_dir, 300, seed) for seed in range(60, 90))
    shared.wait("pages again", lambda: shares(shared, next(tries)))


def shares(cluster: Cluster, prompt: str) -> bool:
    """Whether o1 takes what o0 has just computed; replicas dial a new store within 2 s."""
    before = cluster.replica("o1")["reused_tokens"]
    ask(cluster, prompt, "o0")
    ask(cluster, prompt, "o1")
    return bool(cluster.replica("o1")["reused_tokens"] == before + 299)
