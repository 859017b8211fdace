"""drain, restart and a change of the file, on real engines: no request is cut or wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest
from e2e.cluster import Cluster
from e2e.prompts import exact_prompt

pytestmark = pytest.mark.engine

P1 = """
[[replicas]]
name = "p1"
engine = "mlx"
role = "prefill"
model = "{model}"
compute_dtype = "float32"
"""


@pytest.fixture(scope="module")
def model_dir(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["llama"]


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


class Load:
    """Clients that ask without a pause; every answer is kept."""

    def __init__(self, cluster: Cluster, prompt: str) -> None:
        self.cluster = cluster
        self.prompt = prompt
        self.answers: list[httpx.Response] = []
        self._over = threading.Event()

    def ask(self) -> None:
        with httpx.Client(base_url=self.cluster.url, timeout=120) as http:
            body = {"model": "tiny", "prompt": self.prompt, "temperature": 0, "max_tokens": 12}
            while not self._over.is_set():
                self.answers.append(http.post("/v1/completions", json=body))

    def more(self, count: int) -> Callable[[], bool]:
        """Whether so many answers have come since now."""
        before = len(self.answers)
        return lambda: len(self.answers) > before + count

    @contextmanager
    def running(self) -> Iterator[Load]:
        with ThreadPoolExecutor(2) as threads:
            clients: list[Future[None]] = [threads.submit(self.ask) for _ in range(2)]
            try:
                self.cluster.wait("answers", lambda: len(self.answers) > 2)
                yield self
            finally:
                self._over.set()
        assert [client.exception() for client in clients] == [None, None]


def test_every_answer_is_right_while_the_cluster_is_changed(
    llama: Cluster, model_dir: Path
) -> None:
    """Under load p1 is added, p0 drained and opened, d0 restarted (ordinary o0 answers then),
    p1 removed: every request gets the text that o0 alone gives, and nothing stays behind."""
    prompt = exact_prompt(model_dir, 130, seed=3)
    alone = text(llama.completion(prompt, "o0", max_tokens=12))
    plain = llama.topology.read_text()
    with Load(llama, prompt).running() as load:
        llama.topology.write_text(plain + P1.format(model=model_dir))
        llama.pdctl("up", llama.topology)
        llama.pdctl("drain", llama.name, "p0")
        before = len(load.answers)
        llama.wait("more answers", load.more(4))
        routed = {answer.headers["x-pdctl-path"] for answer in load.answers[before + 2 :]}
        assert routed == {"p1>d0"}
        llama.pdctl("drain", llama.name, "p0", "--undo")
        llama.pdctl("restart", llama.name, "d0")
        llama.pdctl("restart", llama.name, "p0")
        llama.topology.write_text(plain)
        llama.pdctl("up", llama.topology)
    assert {text(answer) for answer in load.answers} == {alone}
    paths = {answer.headers["x-pdctl-path"] for answer in load.answers}
    assert paths >= {"p0>d0", "p1>d0"}
    llama.wait("nothing in flight", llama.idle)
    assert [r["restarts"] for r in llama.status()["replicas"]] == [1, 1, 0]


def test_nothing_restarts_where_the_file_is_the_same(llama: Cluster) -> None:
    before = {r["name"]: r["pid"] for r in llama.status()["replicas"]}
    done = llama.pdctl("up", llama.topology)
    assert done.stdout == f"{llama.url}\n"
    assert {r["name"]: r["pid"] for r in llama.status()["replicas"]} == before
