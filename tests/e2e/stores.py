"""What is asked of a cluster whose replicas share prefixes, and what its page stores have done."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import httpx2 as httpx
import psutil
from e2e.cluster import Cluster
from e2e.test_soak import CLEAR_GAP, answer_alone
from tiny import digits

from pdctl.topology.model import PAGE_TOKENS

PAGE_KIB = 128
"""One of the tiny model's."""
ANSWER_TOKENS = 8
DOCUMENT_TOKENS = 700
FULL_TOKENS = DOCUMENT_TOKENS // PAGE_TOKENS * PAGE_TOKENS
"""In its full pages."""

_seeds = itertools.count(1)


def sharing_of(pages: int) -> str:
    """The section whose budget is so many pages of the tiny model."""
    return f'[sharing]\nbuffer_bytes = "{pages * PAGE_KIB}KiB"\n'


def document() -> str:
    """New to every store and every replica."""
    return digits(DOCUMENT_TOKENS, next(_seeds))


def clear_document(cluster: Cluster, path: str = "mo") -> tuple[str, str]:
    """A document whose answer has no near-tie, and that answer, which one of MLX gives alone."""
    while True:
        text = document()
        answer, gap = answer_alone(cluster, text, path, ANSWER_TOKENS)
        if gap >= CLEAR_GAP:
            return text, answer


def store(cluster: Cluster, host: str = "local") -> dict[str, Any]:
    return next(dict(one) for one in cluster.ps()["stores"] if one["host"] == host)


def cached_tokens(answer: httpx.Response) -> int:
    """How many of the prompt's tokens were not computed."""
    details = answer.json()["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def ask(cluster: Cluster, prompt: str, path: str, **more: Any) -> tuple[str, int]:
    """(text, how many of the prompt's tokens were not computed)."""
    answer = cluster.completion(prompt, path, **{"max_tokens": ANSWER_TOKENS, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], cached_tokens(answer)


def publish(cluster: Cluster, prompt: str, path: str, tokens: int, **more: Any) -> str:
    """Asks for a prompt that is new, and waits until the replica has stored it."""
    stored = cluster.replica(path)["stored_pages"] + -(-tokens // PAGE_TOKENS)
    text, _ = ask(cluster, prompt, path, **more)
    cluster.wait("its pages", lambda: cluster.replica(path)["stored_pages"] >= stored)
    return text


def takes(cluster: Cluster, prompt: str, giver: str, taker: str) -> bool:
    """Whether one takes what the other has just computed, a page of it at least; replicas dial a
    new store within 2 s."""
    before = cluster.replica(taker)["reused_tokens"]
    ask(cluster, prompt, giver)
    ask(cluster, prompt, taker)
    return bool(cluster.replica(taker)["reused_tokens"] >= before + PAGE_TOKENS)


def check_killed_in_mid_traffic(
    cluster: Cluster, paths: Sequence[str], prompts: Sequence[str], tolerated: str | None = None
) -> None:
    """Every request is answered, by every path at once, or told `tolerated`; the store is started
    again."""
    before, failed, begun = store(cluster), list[str](), threading.Event()

    def traffic(path: str) -> None:
        for prompt in prompts:
            answer = cluster.completion(prompt, path, max_tokens=4)
            begun.set()
            if answer.status_code != 200 and not (tolerated and tolerated in answer.text):
                failed.append(answer.text)

    threads = [threading.Thread(target=traffic, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    os.kill(before["pid"], signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert failed == []
    cluster.wait("another store", lambda: store(cluster)["state"] == "ready")
    after = store(cluster)
    assert after["pid"] != before["pid"]
    assert after["restarts"] == before["restarts"] + 1


def check_budget(cluster: Cluster, pages: int) -> None:
    """The store is full, more has come than it holds, and its process has the memory of its
    budget."""
    cluster.wait("pages that went", lambda: store(cluster)["evicted_pages"] > 0)
    seen = store(cluster)
    assert seen["pages"] <= pages
    assert seen["used_bytes"] <= seen["budget_bytes"] == pages * PAGE_KIB << 10
    mapped = psutil.Process(seen["pid"]).memory_info().shared
    assert mapped < 128 << 20
