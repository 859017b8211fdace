"""Two ordinary MLX replicas of one cluster that share prefix KV, through the user's commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from e2e.cluster import Cluster
from e2e.prompts import exact_prompt
from e2e.stores import (
    PAGE_KIB,
    ask,
    check_budget,
    check_killed_in_mid_traffic,
    publish,
    sharing_of,
    store,
    takes,
)

pytestmark = pytest.mark.engine

PAGES = 36
"""Three documents, and not four."""


@pytest.fixture(scope="module")
def model_dir(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["llama"]


@pytest.fixture(scope="module")
def shared(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """o0 and o1; when it is down, so is its page store."""
    folder = tmp_path_factory.mktemp("shared")
    roles = {"o0": "both", "o1": "both"}
    with Cluster(folder, model_dir, roles=roles, handoff=sharing_of(PAGES)) as cluster:
        yield cluster
        pid = store(cluster)["pid"]
    assert not psutil.pid_exists(pid)


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
    assert seen["shared_bytes"] >= 11 * PAGE_KIB << 10
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
    check_budget(shared, PAGES)
    assert shared.replica("o0")["evicted_pages"] > 0


def test_the_store_is_killed_in_mid_traffic(shared: Cluster, model_dir: Path) -> None:
    """Requests go on as misses; the store is started again, and pages are shared again."""
    prompts = [exact_prompt(model_dir, 200, seed) for seed in range(30, 42)]
    check_killed_in_mid_traffic(shared, ("o0", "o1"), prompts)
    tries = (exact_prompt(model_dir, 300, seed) for seed in range(60, 90))
    shared.wait("pages again", lambda: takes(shared, next(tries), "o0", "o1"))
