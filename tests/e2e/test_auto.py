"""`disaggregate = "auto"` over a load that shifts: what is faster is followed, no request fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import Cluster, engine_env
from e2e.data_link import DataLink, ways
from ports import free_port
from tiny import digits

pytestmark = pytest.mark.engine

TOKENS = 744
WITHIN = 10
"""Requests until a shift is followed."""
SLOW_BYTES_PER_S = 2e6
"""12 pages in 0.8 s."""
P_STEP_TOKENS, D_STEP_TOKENS = 64, 8
"""So that d0 computes prompts some times slower than p0."""
QUEUE = 5


class Shifting(Cluster):
    """A quick prefill replica, a slow decode replica, and the link between them in a test's
    hands."""

    def __init__(self, folder: Path, model_dir: Path) -> None:
        super().__init__(folder, model_dir, roles={"p0": "prefill", "d0": "decode"})
        port = free_port()
        self.link = DataLink(("127.0.0.1", port))
        self.seed = 0
        env = {**engine_env(), **ways([self.link])}
        told = ", ".join(f'{key} = "{value}"' for key, value in env.items())
        text = self.topology.read_text().replace("[router]", '[router]\ndisaggregate = "auto"')
        steps = "engine_config = {{ prefill_step_size = {} }}".format
        quick, slow = steps(P_STEP_TOKENS), steps(D_STEP_TOKENS)
        text = text.replace('name = "p0"', f'name = "p0"\ndata_port = {port}\n{quick}')
        text = text.replace('name = "d0"', f'name = "d0"\nenv = {{ {told} }}\n{slow}')
        self.topology.write_text(text)

    def __enter__(self) -> Shifting:
        self.link.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *caught: object) -> None:
        try:
            super().__exit__(*caught)
        finally:
            self.link.__exit__()

    def ask(self, tokens: int = TOKENS, pin: str | None = None) -> tuple[int, str, str]:
        """(status, path, reason) of one request that no cache helps."""
        self.seed += 1
        body = {
            "model": self.model,
            "prompt": digits(tokens, self.seed),
            "max_tokens": 2,
            "temperature": 0,
            "pdctl_cache": False,
        }
        headers = {} if pin is None else {"x-pdctl-path": pin}
        answer = self.http.post("/v1/completions", json=body, headers=headers)
        told = answer.headers.get("x-pdctl-decision", "")
        return answer.status_code, answer.headers.get("x-pdctl-path", ""), told.partition(";")[0]

    def settled_on(self, path: str) -> bool:
        """Whether, within `WITHIN` requests, three in a row took this path, explored ones aside;
        every one of them is answered."""
        row = 0
        for _ in range(WITHIN):
            status, taken, reason = self.ask()
            assert status == 200
            if reason != "explored":
                row = row + 1 if taken == path else 0
            if row == 3:
                return True
        return False

    def decisions(self) -> dict[str, Any]:
        return dict(self.status()["decisions"])


@pytest.fixture(scope="module")
def shifting(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shifting]:
    with Shifting(tmp_path_factory.mktemp("shifting"), checkpoints["llama"]) as cluster:
        yield cluster


def test_the_faster_path_is_taken_from_the_first_request_on(shifting: Shifting) -> None:
    """What `up` measured decides it."""
    assert {cost["path"] for cost in shifting.status()["costs"]} == {"p0>d0", "d0"}
    status, path, reason = shifting.ask()
    assert (status, path, reason) == (200, "p0>d0", "faster")


def test_plan_says_what_up_measured(shifting: Shifting) -> None:
    done = shifting.pdctl("plan", shifting.topology, "--offline", "--json")
    forecast = json.loads(done.stdout)["forecast"]
    assert forecast["unmeasured"] == []
    by_path = {path["path"]: path["cells"] for path in forecast["paths"]}
    assert [cell["tokens"] for cell in by_path["d0"]] == [51, 184, 744]
    assert all(cell["ttft_ms"] > 0 for cell in by_path["p0>d0"])
    assert forecast["pairs"][0]["words"].startswith("mlx → mlx (p0>d0) ")


def test_a_link_that_becomes_slow_is_followed(shifting: Shifting) -> None:
    shifting.link.bytes_per_s = SLOW_BYTES_PER_S
    assert shifting.settled_on("d0"), shifting.decisions()


def test_a_queue_on_the_decode_engine_is_followed(shifting: Shifting) -> None:
    """Behind a queue a handoff costs nothing: it passes meanwhile. The link is as slow as before,
    and d0 alone would be faster without the queue."""
    queue = [
        threading.Thread(target=shifting.ask, args=(1500,), kwargs={"pin": "d0"})
        for _ in range(QUEUE)
    ]
    for each in queue:
        each.start()
    shifting.wait(
        "the queue stands",
        lambda: shifting.decisions()["queued_tokens"]["d0"] > 1500 * (QUEUE - 1),
    )
    status, path, _ = shifting.ask()
    for each in queue:
        each.join(60)
    assert (status, path) == (200, "p0>d0"), shifting.decisions()
    assert shifting.settled_on("d0"), shifting.decisions()


def test_a_dead_prefill_replica_is_followed_and_no_request_fails(shifting: Shifting) -> None:
    """Also one whose pages were under way: D alone answers it, and says so."""
    shifting.link.mend()
    pid = int(shifting.replica("p0")["pid"])
    found: list[tuple[int, str, str]] = []

    def many() -> None:
        for _ in range(WITHIN):
            found.append(shifting.ask())  # noqa: PERF401

    asking = [threading.Thread(target=many) for _ in range(2)]
    for each in asking:
        each.start()
    shifting.wait("some are answered", lambda: len(found) >= 4)
    shifting.kill("p0")
    before = len(found)
    for each in asking:
        each.join(60)
    assert [status for status, *_ in found] == [200] * (2 * WITHIN)
    assert "d0" in {path for _, path, _ in found[before:]}, found
    shifting.wait("a new p0", lambda: shifting.replica("p0")["pid"] not in (None, pid))
    shifting.wait("the pair is back", shifting.ready)


def test_what_was_decided_is_shown_and_exploring_is_bounded(shifting: Shifting) -> None:
    decisions = shifting.decisions()
    assert decisions["decides"]
    assert sum(decisions["reasons"].values()) == decisions["decided"] > 3 * WITHIN
    assert decisions["exploring_s"] <= 0.02 * decisions["expected_s"]
    assert decisions["latest"][0].keys() >= {"path", "reason", "prompt_tokens", "expected_ms"}
    text = shifting.http.get("/metrics").text
    assert 'pdctl_router_decisions_total{path="d0",reason="faster"}' in text


def test_what_was_measured_is_its_owners_alone(shifting: Shifting) -> None:
    (file,) = (shifting.state / "pdctl").glob("*/costs.json")
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_bytes())["paths"].keys() == {"p0>d0", "d0"}
