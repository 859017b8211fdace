"""Many clients of one cluster at once, who know the right answers."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx2 as httpx
from e2e.asking import check_next_is_right
from e2e.cluster import Cluster
from e2e.mixed import Mixed
from e2e.test_soak import CLIENTS, OUTPUT_TOKENS

COUNTED = ("handoffs_completed", "handoffs_failed", "handoffs_cancelled", "imported_tokens")


class Crowd:
    """Sixteen for a while, each on every path in turn.

    Args:
        answers: prompt → the right text.
        paths: to pin; None leaves the choice to the router.
        leaving: the share of requests whose client goes away at a random moment.
    """

    def __init__(
        self,
        cluster: Cluster,
        answers: dict[str, str],
        paths: Sequence[str | None],
        *,
        leaving: float = 0.0,
    ) -> None:
        self.served: Counter[str] = Counter()
        """By the path that was taken."""
        self.prompted: Counter[str] = Counter()
        """Prompt tokens of those."""
        self.wrong: list[str] = []
        self.refused: list[str] = []
        """What was said instead of an answer."""
        self._cluster, self._answers = cluster, answers
        self._paths, self._leaving = paths, leaving

    def run(self, seconds: float, go_on: Callable[[], bool] = lambda: False) -> None:
        """For so long, and while `go_on` says so."""
        until_s = time.monotonic() + seconds

        def client(number: int) -> None:
            tries = self._tries(number)
            while time.monotonic() < until_s or go_on():
                next(tries)

        with ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(client, number) for number in range(CLIENTS)]:
                done.result(seconds + 240)

    def check(self) -> None:
        """Every answer was right."""
        assert self.wrong == []
        assert self.refused == []

    def _tries(self, number: int) -> Iterator[None]:
        """One request after the other."""
        rng = random.Random(number)
        for path in itertools.islice(itertools.cycle(self._paths), number % len(self._paths), None):
            prompt = rng.choice(list(self._answers))
            body = {"cache_salt": str(rng.random()), "pdctl_cache": False}
            if rng.random() < self._leaving:
                self._leave(path, prompt, body, rng.uniform(0, 0.5))
            else:
                self._stay(path, prompt, body)
            yield

    def _stay(self, path: str | None, prompt: str, body: dict[str, Any]) -> None:
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, **body}
        answer = self._cluster.http.post(
            "/v1/completions", json={**asked, "temperature": 0}, headers=pinned(path)
        )
        if answer.status_code != 200:
            self.refused.append(f"{answer.status_code} {answer.json()['error']['message']}")
            return
        taken, found = answer.headers["x-pdctl-path"], answer.json()
        text = found["choices"][0]["text"]
        if text.strip() != self._answers[prompt].strip():
            self.wrong.append(f"{taken} {prompt[:20]}: {text!r} != {self._answers[prompt]!r}")
            return
        self.served[taken] += 1
        self.prompted[taken] += found["usage"]["prompt_tokens"]

    def _leave(self, path: str | None, prompt: str, body: dict[str, Any], after_s: float) -> None:
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 400, "stream": True, **body}
        timeout = httpx.Timeout(30, read=max(0.01, after_s))
        with (
            suppress(httpx.TimeoutException),
            self._cluster.http.stream(
                "POST", "/v1/completions", json=asked, headers=pinned(path), timeout=timeout
            ) as answer,
        ):
            next(answer.iter_lines(), None)


def pinned(path: str | None) -> dict[str, str]:
    return {} if path is None else {"x-pdctl-path": path}


def counted(cluster: Cluster, paths: Iterable[str]) -> dict[str, Counter[str]]:
    """Path → its pair's counters."""
    pairs = {path: cluster.pair(*path.split(">")) for path in paths}
    return {path: Counter({name: pair[name] for name in COUNTED}) for path, pair in pairs.items()}


def check_leaving(
    cluster: Mixed, answers: dict[str, str], paths: Sequence[str], seconds: float
) -> None:
    """Half of the clients go away at random moments: the others' answers are right, no handoff
    fails, nothing is left."""
    before, clients = counted(cluster, paths), Crowd(cluster, answers, paths, leaving=0.5)
    clients.run(seconds)
    clients.check()
    cluster.wait("nothing in flight", cluster.idle, 15)
    after = counted(cluster, paths)
    for path in paths:
        gained = after[path] - before[path]
        assert gained["handoffs_failed"] == 0
        assert gained["handoffs_completed"] >= clients.served[path] > 0
        check_next_is_right(cluster, path)
