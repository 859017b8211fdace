"""vLLM beside MLX in one cluster: what clients are told, what is secret, what at `up` is caught."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from e2e.mixed import BUFFER_TOKENS, CONTEXT, Mixed
from e2e.test_soak import CLIENTS, OUTPUT_TOKENS, clear_answers
from engines.vllm_replicas import needs_vllm
from tiny import digits

from pdctl.engines.channel import RUN_ENV

pytestmark = [pytest.mark.engine, needs_vllm]

PAIRS = ("vp>vd", "vp>md", "mp>vd")
LOAD_S = 8.0
WRONG = [
    f"write {how}" for how in ("swaps K and V", "leaves out a page", "shifts layers", "rotates K")
]


def ask(cluster: Mixed, path: str, tokens: int, **body: object) -> httpx.Response:
    fresh = {"pdctl_cache": False, "cache_salt": f"{path} {tokens}", "max_tokens": 8}
    return cluster.completion(digits(tokens, 3), path, **{**fresh, **body})


def check_error(response: httpx.Response, status: int, *words: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert [word for word in words if word not in error["message"]] == []
    assert "Internal" not in error["message"]


def check_next_is_right(cluster: Mixed, path: str) -> None:
    cluster.wait("nothing in flight", cluster.idle, 10)
    prompt = {"tokens": 130, "cache_salt": "next"}
    alone = ask(cluster, path.partition(">")[2], **prompt)
    handed = ask(cluster, path, **prompt)
    assert (alone.status_code, handed.status_code) == (200, 200), handed.text
    assert handed.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]


def test_the_key_is_in_no_process_s_environment_or_arguments(mixed: Mixed) -> None:
    """Of vLLM's three processes neither; only the one that owns the KV memory is ever told it."""
    key = (mixed.state / "pdctl" / mixed.name / "key").read_text().strip()
    assert len(bytes.fromhex(key)) == 32
    found = [process for name in ("vp", "vd", "mp", "md") for process in mixed.processes(name)]
    found.append(psutil.Process(mixed.ps()["router"]["pid"]))
    for process in found:
        for file in ("environ", "cmdline"):
            assert key.encode() not in Path(f"/proc/{process.pid}/{file}").read_bytes()
    for name in ("vp", "vd"):
        own = [process for process in mixed.processes(name) if "VLLM::" in process.name()]
        assert len(own) == 2
        for pid in (mixed.replica(name)["pid"], *(process.pid for process in own)):
            started = mixed.faults.started_with(pid)
            assert RUN_ENV in started
            assert key not in started


def computed(cluster: Mixed, replica: str) -> float:
    """Prompt tokens so far."""
    if replica[0] == "v":
        return cluster.computed_tokens(replica)
    return float(cluster.replica(replica)["prompt_tokens"])


@pytest.mark.parametrize("path", PAIRS)
def test_a_prompt_over_the_buffer_is_refused_before_prefill(mixed: Mixed, path: str) -> None:
    """R40: the client's mistake, whichever engine says it."""
    prefill = path.partition(">")[0]
    before = computed(mixed, prefill)
    response = ask(mixed, path, BUFFER_TOKENS + 50)
    check_error(response, 400, f"{BUFFER_TOKENS + 50} tokens", prefill, str(BUFFER_TOKENS))
    assert response.json()["error"]["code"] == "over_budget"
    mixed.wait("nothing in flight", mixed.idle, 10)
    # where the other leg answers first, an order to release is a request of one token
    assert computed(mixed, prefill) - before <= 1
    check_next_is_right(mixed, path)


@pytest.mark.parametrize("path", PAIRS)
def test_a_prompt_over_the_context_is_refused_by_parameter(mixed: Mixed, path: str) -> None:
    """U18: 400, and nothing begins."""
    response = ask(mixed, path, CONTEXT + 50)
    check_error(response, 400, str(CONTEXT))
    assert response.json()["error"]["param"] == "prompt"
    response = mixed.chat(digits(CONTEXT + 50, 3), path, max_tokens=8)
    check_error(response, 400, str(CONTEXT))
    assert response.json()["error"]["param"] == "messages"
    check_next_is_right(mixed, path)


@pytest.mark.parametrize("path", PAIRS)
def test_a_prompt_of_one_token_is_served_or_refused_cleanly(mixed: Mixed, path: str) -> None:
    """R27: vLLM alone needs no page for it; MLX has nothing to begin with. Both engines live."""
    response = ask(mixed, path, 1)
    if path == "vp>vd":
        assert response.status_code == 200, response.text
        alone = ask(mixed, "vd", 1)
        assert response.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
    else:
        check_error(response, 400, "1 token")
    check_next_is_right(mixed, path)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fault", "words"),
    [
        ("vp>vd", "write raises", ('replica "vd"', "could not be written")),
        ("mp>vd", "write raises", ("vd", "could not be written")),
        ("vp>vd", "gather raises", ("the copy of a layer broke",)),
        ("vp>md", "gather raises", ("the copy of a layer broke",)),
        ("vp>vd", "DecodeLeg.start raises", ('decode replica "vd"', "broke")),
        ("vp>md", "PrefillLeg.start raises", ("prefill", "broke")),
    ],
)
def test_a_failed_handoff_is_told_by_leg_replica_and_cause(
    mixed: Mixed, path: str, fault: str, words: tuple[str, ...], stream: bool
) -> None:
    """R34, R67, R72: vLLM's own answer is a bare 500; that request fails alone, and is never
    computed by decode in silence."""
    before = mixed.pair(*path.split(">"))
    with mixed.faults.of(fault):
        response = ask(mixed, path, 200, cache_salt=f"{fault} {stream}", stream=stream)
    check_error(response, 502, *words)
    assert response.json()["error"]["code"] == "handoff"
    assert response.headers["x-pdctl-path"] == path
    check_next_is_right(mixed, path)
    began = "start" not in fault
    assert mixed.pair(*path.split(">"))["handoffs_failed"] == before["handoffs_failed"] + began


@pytest.fixture(scope="module")
def answers(mixed: Mixed, checkpoints: dict[str, Path]) -> dict[str, str]:
    return clear_answers(mixed, checkpoints["llama"], "md")


class Clients:
    """Sixteen at once for a while, each on the three pairs in turn."""

    def __init__(self, cluster: Mixed, answers: dict[str, str], *, leaving: float) -> None:
        self.served: Counter[str] = Counter()
        self.imported: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._cluster, self._answers, self._leaving = cluster, answers, leaving

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(self._client, number, until) for number in range(CLIENTS)]:
                done.result(seconds + 60)

    def _client(self, number: int, until: float) -> None:
        rng = random.Random(number)
        paths = itertools.islice(itertools.cycle(PAIRS), number % 3, None)
        while time.monotonic() < until:
            path, prompt = next(paths), rng.choice(list(self._answers))
            body = {"cache_salt": str(rng.random()), "pdctl_cache": False}
            if rng.random() < self._leaving:
                self._leave(path, prompt, body, rng.uniform(0, 0.5))
            else:
                self._stay(path, prompt, body)

    def _stay(self, path: str, prompt: str, body: dict[str, Any]) -> None:
        answer = self._cluster.completion(prompt, path, max_tokens=OUTPUT_TOKENS, **body).json()
        text = answer["choices"][0]["text"] if "choices" in answer else str(answer)
        if text.strip() != self._answers[prompt].strip():
            self.wrong.append(f"{path} {prompt[:20]}: {text!r} != {self._answers[prompt]!r}")
            return
        self.served[path] += 1
        self.imported[path] += answer["usage"]["prompt_tokens"] - 1

    def _leave(self, path: str, prompt: str, body: dict[str, Any], after_s: float) -> None:
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 400, "stream": True, **body}
        timeout = httpx.Timeout(30, read=max(0.01, after_s))
        headers = {"x-pdctl-path": path}
        with (
            suppress(httpx.TimeoutException),
            self._cluster.http.stream(
                "POST", "/v1/completions", json=asked, headers=headers, timeout=timeout
            ) as answer,
        ):
            next(answer.iter_lines(), None)


COUNTED = ("handoffs_completed", "handoffs_failed", "handoffs_cancelled", "imported_tokens")


def counted(cluster: Mixed, path: str) -> dict[str, int]:
    pair = cluster.pair(*path.split(">"))
    return {name: pair[name] for name in COUNTED}


def test_sixteen_clients_on_three_pairs_are_counted_exactly(
    mixed: Mixed, answers: dict[str, str]
) -> None:
    """U3, U7, U17: every answer is right, and every handoff and token is counted once."""
    before = {path: counted(mixed, path) for path in PAIRS}
    clients = Clients(mixed, answers, leaving=0.0)
    clients.run(LOAD_S)
    assert clients.wrong == []
    mixed.wait("nothing in flight", mixed.idle, 15)
    for path in PAIRS:
        after = counted(mixed, path)
        assert clients.served[path] > 0
        assert {name: after[name] - before[path][name] for name in COUNTED} == {
            "handoffs_completed": clients.served[path],
            "handoffs_failed": 0,
            "handoffs_cancelled": 0,
            "imported_tokens": clients.imported[path],
        }


def test_clients_that_leave_at_random_moments_take_nothing_with_them(
    mixed: Mixed, answers: dict[str, str]
) -> None:
    """U1, U4, U5, U34, R19: the others' answers are right, no handoff fails, nothing is left."""
    before = {path: counted(mixed, path) for path in PAIRS}
    clients = Clients(mixed, answers, leaving=0.5)
    clients.run(LOAD_S)
    assert clients.wrong == []
    mixed.wait("nothing in flight", mixed.idle, 15)
    for path in PAIRS:
        after = counted(mixed, path)
        assert after["handoffs_failed"] == before[path]["handoffs_failed"]
        completed = after["handoffs_completed"] - before[path]["handoffs_completed"]
        assert completed >= clients.served[path] > 0
        check_next_is_right(mixed, path)


@pytest.mark.parametrize(
    ("fault", "pair"), [("write zeroes", "mp1>vd"), ("gather zeroes", "vp>md1")]
)
def test_wrong_kv_fails_the_up_that_brings_it(mixed: Mixed, fault: str, pair: str) -> None:
    """U13, U16: the canary catches it: exit 5, the pair is named, the cluster is as it was."""
    mixed.write(next(name for name in pair.split(">") if name[-1] == "1"))
    with mixed.faults.of(fault):
        done = mixed.pdctl("up", mixed.topology, "--detach", check=False)
    mixed.write()
    assert done.returncode == 5, done.stdout + done.stderr
    assert f"{pair} failed its canary" in done.stderr
    assert "the KV cache is not its own" in done.stderr
    mixed.wait("every pair ready", mixed.ready)
    assert {r["name"] for r in mixed.status()["replicas"]} == {"vp", "vd", "mp", "md"}
    check_next_is_right(mixed, "vp>vd")


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_kv_keeps_a_started_replica_out(mixed: Mixed, fault: str) -> None:
    """U12, U13, U16: K and V swapped, one page missing, layers shifted by one, RoPE's theta off:
    the same canary, each time that an end of the pair starts."""
    with mixed.faults.of(fault):
        done = mixed.pdctl("restart", mixed.topology, "mp", check=False)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "mp>vd failed its canary" in done.stderr
        assert "the KV cache is not its own" in done.stderr
        check_error(ask(mixed, "mp>vd", 90), 503, "mp>vd is not ready", "the KV cache")
    mixed.wait("every pair ready", mixed.ready)
    check_next_is_right(mixed, "mp>vd")


def test_an_engine_with_another_theta_than_its_file_is_not_launched(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Effective values count: the field and both values are named, and all is rolled back."""
    cluster = Mixed(tmp_path, checkpoints["llama"], "vp md")
    with cluster.faults.of("theta"):
        done = cluster.pdctl("up", cluster.topology, "--detach", check=False)
    assert done.returncode == 5, done.stdout + done.stderr
    told = 'replica "vp" failed: positions.rope_theta should be 100000.0, the engine has 10000.0'
    assert told in done.stderr
    assert list(cluster.leftovers()) == []
