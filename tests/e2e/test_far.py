"""Clusters over real SSH, their whole life: prefill here and decode there, both elsewhere, and
the router elsewhere too. Nothing of them stays on any machine."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e.cluster import text_of
from e2e.over_ssh import OverSsh, processes, replica_table
from e2e.prompts import exact_prompt
from e2e.test_life import Load, text
from ports import free_port
from runtime.fleet import own_address
from sshd import Machines, machines

pytestmark = [pytest.mark.engine, pytest.mark.ssh]

LAYOUTS = {
    "decode elsewhere": ("local", {"p0": "local", "d0": "studio", "o0": "local"}),
    "both elsewhere": ("local", {"p0": "gpu1", "d0": "studio", "o0": "studio"}),
    "all elsewhere": ("gpu1", {"p0": "gpu1", "d0": "studio", "o0": "gpu1"}),
}


@pytest.fixture(scope="module")
def far() -> Iterator[Machines]:
    """gpu1 and studio; each has our key, and so reaches the other."""
    with machines() as found:
        for name in ("gpu1", "studio"):
            found.add(name, found.environment)
        yield found


@pytest.fixture
def made(far: Machines, checkpoints: dict[str, Path], tmp_path: Path) -> Callable[[str], OverSsh]:
    address = own_address()
    if address is None or address.startswith("127."):
        pytest.skip("this machine has no address beyond loopback")
    if shutil.which("ss") is None:
        pytest.skip("needs ss, to prove that nothing listens")
    addresses = dict.fromkeys(("local", "gpu1", "studio"), address)

    def make(layout: str) -> OverSsh:
        router, where = LAYOUTS[layout]
        return OverSsh(tmp_path, checkpoints["llama"], far, where, addresses, router=router)

    return make


def check_requests(cluster: OverSsh, model: Path) -> None:
    """Plain and streamed, through the pair: the text is the ordinary replica's."""
    for tokens in (40, 300):
        prompt = exact_prompt(model, tokens, seed=tokens)
        alone = cluster.completion(prompt, "o0", max_tokens=10).json()["choices"][0]["text"]
        answer = cluster.completion(prompt, "p0>d0", max_tokens=10)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-pdctl-path"] == "p0>d0"
        assert answer.json()["choices"][0]["text"] == alone
        body = {"prompt": prompt, "max_tokens": 10}
        assert text_of(cluster.stream("/v1/completions", body, "p0>d0")) == alone
    cluster.wait("nothing in flight", cluster.idle)


def check_ps(cluster: OverSsh) -> None:
    """Every replica under its host, and a row for each host beside the router's."""
    found = cluster.ps()
    assert {r["name"]: r["host"] for r in found["replicas"]} == cluster.where
    hosts = cluster.hosts()
    assert set(hosts) == set(cluster.where.values()) - {cluster.router_host}
    table = cluster.pdctl("ps", cluster.topology).stdout
    for name, host in hosts.items():
        assert host["state"] == "ready"
        assert 0 < host["round_trip_s"] < 5
        assert abs(host["clock_offset_s"]) < 5
        assert any(line.split()[:2] == [name, "ready"] for line in table.splitlines()), table


class Followed:
    """`pdctl logs -f`, read beside the test."""

    def __init__(self, cluster: OverSsh, *names: str) -> None:
        self._cluster = cluster
        self._running = cluster.begin("logs", cluster.topology, *names, "-f", "--tail", "1")
        self.lines: list[str] = []

    def __enter__(self) -> Followed:
        self._process = self._running.__enter__()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._cluster.wait("the last lines", lambda: bool(self.lines), 30)
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(20)
        self._reader.join(20)
        self._running.__exit__(None, None, None)


def check_changes(cluster: OverSsh) -> None:
    """drain and back, restart, and `up` again with a changed far replica; its log is followed."""
    cluster.pdctl("drain", cluster.topology, "d0")
    assert cluster.replica("d0")["state"] == "draining"
    assert cluster.completion("hello", "p0>d0", max_tokens=2).status_code == 503
    cluster.pdctl("drain", cluster.topology, "d0", "--undo")
    before = {r["name"]: r["pid"] for r in cluster.status()["replicas"]}
    with Followed(cluster, "d0") as followed:
        cluster.pdctl("restart", cluster.topology, "d0")
        cluster.wait("its lines", lambda: any("replica=d0 ready" in x for x in followed.lines[1:]))
    assert all(line.startswith("d0 | ") for line in followed.lines)
    marked = 'name = "d0"\nenv = { PDCTL_TEST_MARK = "1" }'
    cluster.edit('name = "d0"', marked)
    told = cluster.pdctl("up", cluster.topology)
    assert "~ d0: env.PDCTL_TEST_MARK" in told.stderr
    assert told.stdout == f"{cluster.url}\n"
    after = {r["name"]: r["pid"] for r in cluster.status()["replicas"]}
    assert [name for name in before if before[name] != after[name]] == ["d0"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_clusters_life(
    layout: str, made: Callable[[str], OverSsh], checkpoints: dict[str, Path]
) -> None:
    """R58: up, requests, ps, logs -f, drain, restart, up again, down; each time the pair
    gives the text of an ordinary replica, and at the end nothing is left on any machine."""
    with made(layout) as cluster:
        assert len(processes(cluster.far, cluster.record())) > len(cluster.where)
        check_requests(cluster, checkpoints["llama"])
        check_ps(cluster)
        check_changes(cluster)
        check_requests(cluster, checkpoints["llama"])


def test_what_is_added_elsewhere_cuts_nothing(
    made: Callable[[str], OverSsh], checkpoints: dict[str, Path]
) -> None:
    """While requests run through the connection to studio, p1 comes there and d0 is reached at
    another port: every answer is right, and both serve."""
    model = checkpoints["llama"]
    prompt = exact_prompt(model, 200, seed=8)
    with made("both elsewhere") as cluster:
        alone = cluster.completion(prompt, "o0", max_tokens=12).json()["choices"][0]["text"]
        with Load(cluster, prompt).running() as load:
            p1 = replica_table("p1", "studio", "prefill", model)
            cluster.topology.write_text(cluster.topology.read_text() + p1)
            assert "+ p1" in cluster.pdctl("up", cluster.topology).stderr
            cluster.wait("answers", load.more(4))
            cluster.edit('name = "d0"', f'name = "d0"\nhttp_port = {free_port()}')
            assert "~ d0: http_port" in cluster.pdctl("up", cluster.topology).stderr
            cluster.wait("answers", load.more(4))
        assert {text(answer) for answer in load.answers} == {alone}
        assert text(cluster.completion(prompt, "p1>d0", max_tokens=12)) == alone
        check_requests(cluster, model)


def test_the_foreground_with_its_keeper_elsewhere(made: Callable[[str], OverSsh]) -> None:
    """Lines of every machine's logs are shown; Ctrl-C is a down, there too."""
    cluster = made("all elsewhere")
    with cluster.begin("up", cluster.topology) as running:
        assert running.stdout is not None
        url = running.stdout.readline().strip()
        record = cluster.record()
        assert url == record.url == cluster.url
        with cluster.log("d0").open("a") as log:
            log.write("a line of its own\n")
        line = next(line for line in running.stdout if "a line of its own" in line)
        assert line.split(" | ")[0].strip() == "d0"
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    cluster.assert_nothing_left(record)
    assert processes(cluster.far, record) == []
    assert "a line of its own" in cluster.pdctl("logs", cluster.topology, "d0").stdout
