"""Load over SSH: prefill and decode on two machines, and many clients that go away."""

from __future__ import annotations

import json
import os
import platform
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from e2e.cluster import Cluster, text_of
from e2e.over_ssh import OverSsh, processes
from e2e.test_soak import CLIENTS, OUTPUT_TOKENS, clear_answers
from runtime.fleet import own_address
from sshd import machines

pytestmark = [pytest.mark.engine, pytest.mark.ssh, pytest.mark.slow]

FAR_REQUESTS = 2000
CANCEL_WITHIN_S = 1.0
PATIENCE_S = 60.0
RESULT_ENV = "PDCTL_TEST_RESULT"
"""Where a file is to be written with what the soak over SSH measured."""
KINDS = {
    "replicas": "mlx.server",
    "router": "pdctl.runtime.router",
    "agents": "pdctl.runtime.agent",
    "ssh and far ends": "far_end",
}


@pytest.fixture(scope="module")
def far(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OverSsh]:
    """p0 and d0 on two machines over SSH, router and o0 here."""
    address = own_address()
    if address is None or address.startswith("127."):
        pytest.skip("this machine has no address beyond loopback")
    where = {"p0": "gpu1", "d0": "studio", "o0": "local"}
    addresses = dict.fromkeys(("local", "gpu1", "studio"), address)
    with machines() as found:
        for name in ("gpu1", "studio"):
            found.add(name, found.environment)
        folder = tmp_path_factory.mktemp("far")
        with OverSsh(folder, checkpoints["llama"], found, where, addresses) as cluster:
            yield cluster


class Clients:
    """Sixteen of them, each with one request after the other; what became of all."""

    def __init__(self, cluster: Cluster, answers: dict[str, str]) -> None:
        self.cluster = cluster
        self.answers = answers
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def run(self, requests: int, *, seed: int) -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            for outcome in pool.map(self._ask, range(seed, seed + requests)):
                self.outcomes[outcome] += 1

    def _ask(self, seed: int) -> str:
        """One request, whole or cancelled at a random moment, as its number says."""
        rng = random.Random(seed)
        prompt = rng.choice(list(self.answers))
        cancel_s = rng.uniform(0.0, CANCEL_WITHIN_S) if rng.random() < 0.5 else None
        limit = {"max_tokens": OUTPUT_TOKENS if cancel_s is None else 400}
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "stream": True, **limit}
        try:
            return self._read(prompt, body, cancel_s)
        except httpx.TimeoutException:
            return "hung" if cancel_s is None else "cancelled"

    def _read(self, prompt: str, body: dict[str, Any], cancel_s: float | None) -> str:
        began_s = time.monotonic()
        text, done = "", False
        timeout = httpx.Timeout(
            PATIENCE_S, read=PATIENCE_S if cancel_s is None else max(0.01, cancel_s)
        )
        path = {"x-pdctl-path": "p0>d0"}
        with self.cluster.http.stream(
            "POST", "/v1/completions", json=body, headers=path, timeout=timeout
        ) as answer:
            if answer.status_code != 200:
                self._note(f"{answer.status_code}: {answer.read().decode()}")
                return "refused"
            for line in answer.iter_lines():
                if cancel_s is not None and time.monotonic() > began_s + cancel_s:
                    return "cancelled"
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    text += text_of([json.loads(line[6:])])
        expected = self.answers[prompt]
        right = text == expected if cancel_s is None else text.startswith(expected)
        if not (done and right):
            self._note(f"{prompt[:20]}: {text!r} != {expected!r}")
            return "wrong"
        return "whole"

    def _note(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)


def sizes(cluster: OverSsh) -> dict[str, tuple[int, int]]:
    """Command line of each process of the cluster, on any machine → (MiB, descriptors)."""
    found = {}
    for line in processes(cluster.far, cluster.record()):
        pid, _, command = line.partition(" ")
        process = psutil.Process(int(pid))
        found[command] = (process.memory_info().rss >> 20, process.num_fds())
    return found


def test_two_thousand_requests_over_ssh(far: OverSsh, checkpoints: dict[str, Path]) -> None:
    """U1, U3, U17, U34: half of them cancelled at random moments, under sixteen clients: no leak,
    no hang, no wrong answer. What was measured goes to the file that PDCTL_TEST_RESULT names."""
    clients = Clients(far, clear_answers(far, checkpoints["llama"]))
    clients.run(FAR_REQUESTS // 4, seed=0)
    far.wait("idle", far.idle, 15)
    warm = sizes(far)
    began_s = time.monotonic()
    clients.run(FAR_REQUESTS - FAR_REQUESTS // 4, seed=FAR_REQUESTS)
    took_s = time.monotonic() - began_s
    far.wait("idle", far.idle, 15)
    end = sizes(far)
    record_soak(clients, took_s, warm, end)
    assert clients.wrong == []
    assert set(clients.outcomes) == {"whole", "cancelled"}
    assert sum(clients.outcomes.values()) == FAR_REQUESTS
    assert min(clients.outcomes.values()) > FAR_REQUESTS // 5
    assert end.keys() == warm.keys()
    for command, (mib, descriptors) in end.items():
        assert descriptors <= warm[command][1] + 8, command
        assert mib <= warm[command][0] * 1.1 + 64, command
    assert all(replica["restarts"] == 0 for replica in far.status()["replicas"])


def record_soak(
    clients: Clients,
    took_s: float,
    warm: dict[str, tuple[int, int]],
    end: dict[str, tuple[int, int]],
) -> None:
    place = os.environ.get(RESULT_ENV)
    if place is None:
        return
    load_1m = os.getloadavg()[0]
    grown = {
        kind: {
            "processes": len([c for c in end if mark in c]),
            "mib_warm_end": [sum(s[0] for c, s in at.items() if mark in c) for at in (warm, end)],
            "descriptors_warm_end": [
                sum(s[1] for c, s in at.items() if mark in c) for at in (warm, end)
            ],
        }
        for kind, mark in KINDS.items()
    }
    found = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "method": "Streamed completions through a pair whose ends are on two machines, each an "
        "sshd on loopback; tiny random Llama. Half of them are cancelled at a random moment, the "
        "others must give the ordinary replica's text. Sizes: after a quarter, and at the end, "
        "idle both times.",
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "load_1m": load_1m},
        "versions": {name: version(name) for name in ("pdctl", "mlx", "mlx-lm", "aiohttp")},
        "clients": CLIENTS,
        "requests": sum(clients.outcomes.values()),
        "outcomes": dict(clients.outcomes),
        "requests_per_s_after_warming": round(FAR_REQUESTS * 3 / 4 / took_s, 1),
        "wrong": clients.wrong,
        "sizes": grown,
    }
    Path(place).write_text(json.dumps(found, indent=2) + "\n")
