"""A cluster on three machines with addresses of their own, and a cable that is pulled."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import text_of
from e2e.over_ssh import OverSsh, apart, processes
from e2e.prompts import exact_prompt
from namespaces import Network

pytestmark = [pytest.mark.engine, pytest.mark.ssh]

GIVEN_UP_S = 20.0
"""From a pulled cable to the client's answer: the connection over SSH is dead after 15 s."""
SILENCE_S = 7.5
"""The same in mid-transfer: the data plane is dead after 5 s."""
AT_ONCE_S = 2.0
BACK_S = 60.0
MOMENT_S = 2.0
DECODED_TOKENS = 1400
DECODING = 5
"""Events after which the first leg is over and many tokens are still to come."""
PACE = 'env = { PDCTL_PACING_BYTES_PER_S = "1000000" }'
"""Makes a transfer of a long prompt take seconds."""


@pytest.fixture(scope="module")
def cluster(
    net: Network, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OverSsh]:
    """Router and o0 here, p0 on gpu1, d0 on studio."""
    with apart(net, "gpu1", "studio") as (far, addresses):
        where = {"p0": "gpu1", "d0": "studio", "o0": "local"}
        folder = tmp_path_factory.mktemp("namespaces")
        made = OverSsh(folder, checkpoints["llama"], far, where, addresses)
        made.edit('name = "p0"', f'name = "p0"\n{PACE}')
        with made:
            yield made


@pytest.fixture(scope="module")
def prompt(checkpoints: dict[str, Path]) -> str:
    return exact_prompt(checkpoints["llama"], 200, seed=31)


@pytest.fixture(scope="module")
def alone(cluster: OverSsh, prompt: str) -> str:
    """What o0 answers."""
    answer = cluster.completion(prompt, "o0", max_tokens=DECODED_TOKENS)
    return str(answer.json()["choices"][0]["text"])


class Asked:
    """A streamed completion through the pair, in its own thread."""

    def __init__(self, cluster: OverSsh, prompt: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.ended_s = 0.0
        self._thread = threading.Thread(target=self._ask, args=(cluster, prompt))
        self._thread.start()

    def _ask(self, cluster: OverSsh, prompt: str) -> None:
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "stream": True}
        body["max_tokens"] = DECODED_TOKENS
        path = {"x-pdctl-path": "p0>d0"}
        with cluster.http.stream("POST", "/v1/completions", json=body, headers=path) as answer:
            for line in answer.iter_lines():
                word = line.removeprefix("data: ")
                if word.startswith("{"):
                    self.events.append(json.loads(word))
        self.ended_s = time.monotonic()

    def join(self, within_s: float) -> None:
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "the client hangs"

    @property
    def text(self) -> str:
        return text_of([event for event in self.events if "choices" in event])

    @property
    def error(self) -> str:
        """The last event's; empty where it is none."""
        return str(self.events[-1].get("error", {}).get("message", ""))


def check_whole(cluster: OverSsh, prompt: str, alone: str, pids: dict[str, int]) -> None:
    """Every pair is ready again, with the processes of before, and answers rightly."""
    cluster.wait("every pair is ready", cluster.ready, BACK_S)
    assert pids_of(cluster) == pids
    answer = cluster.completion(prompt, "p0>d0", max_tokens=DECODED_TOKENS)
    assert answer.json()["choices"][0]["text"] == alone
    cluster.wait("nothing in flight", cluster.idle)


def pids_of(cluster: OverSsh) -> dict[str, int]:
    return {replica["name"]: replica["pid"] for replica in cluster.status()["replicas"]}


def test_three_addresses(cluster: OverSsh, net: Network, prompt: str, alone: str) -> None:
    """The data plane goes from one machine to the other, by its own address."""
    assert cluster.record().plan.replica("p0").data_host == net.addresses["gpu1"]
    assert {name: host["state"] for name, host in cluster.hosts().items()} == {
        "gpu1": "ready",
        "studio": "ready",
    }
    check_whole(cluster, prompt, alone, pids_of(cluster))


def test_a_cable_that_is_out_for_a_moment(
    cluster: OverSsh, net: Network, prompt: str, alone: str
) -> None:
    """Two seconds without decode's machine while it answers: the stream goes on, and is whole."""
    asked = Asked(cluster, prompt)
    cluster.wait("it decodes", lambda: len(asked.events) > DECODING)
    with net.unplugged("studio"):
        threading.Event().wait(MOMENT_S)
    asked.join(60)
    assert (asked.text, asked.error) == (alone, "")
    cluster.wait("nothing in flight", cluster.idle)


def test_decodes_cable_is_out(cluster: OverSsh, net: Network, prompt: str, alone: str) -> None:
    """R61: whoever waits is told; the next ones are told at once; the ordinary replica serves;
    nothing there restarts, and all is well when the cable is back."""
    pids = pids_of(cluster)
    asked = Asked(cluster, prompt)
    cluster.wait("it decodes", lambda: len(asked.events) > DECODING)
    with net.unplugged("studio"):
        out_s = time.monotonic()
        asked.join(GIVEN_UP_S + 10)
        assert asked.ended_s - out_s < GIVEN_UP_S
        assert 'decode replica "d0"' in asked.error
        cluster.wait("its host is away", lambda: cluster.hosts()["studio"]["state"] != "ready")
        assert cluster.replica("d0")["state"] == "unreachable"
        again_s = time.monotonic()
        assert cluster.completion(prompt, "p0>d0", max_tokens=4).status_code == 503
        assert cluster.completion(prompt, "o0", max_tokens=4).status_code == 200
        assert time.monotonic() - again_s < AT_ONCE_S
    check_whole(cluster, prompt, alone, pids)


def test_prefills_cable_is_out_in_mid_transfer(
    cluster: OverSsh, net: Network, prompt: str, alone: str, checkpoints: dict[str, Path]
) -> None:
    """U10: both ends let go of it, and the client is told before a token."""
    pids = pids_of(cluster)
    asked = Asked(cluster, exact_prompt(checkpoints["llama"], 900, seed=5))
    cluster.wait("pages travel", lambda: cluster.replica("d0")["handoffs_active"] == 1)
    with net.unplugged("gpu1"):
        out_s = time.monotonic()
        asked.join(GIVEN_UP_S)
        assert asked.ended_s - out_s < SILENCE_S
        assert (asked.text, asked.error != "") == ("", True)
        cluster.wait("decode has let go", lambda: cluster.replica("d0")["handoffs_active"] == 0)
    check_whole(cluster, prompt, alone, pids)


def test_down_while_a_machine_is_away(cluster: OverSsh, net: Network) -> None:
    """U26: what can't be proven is said, host by host, with exit code 1; the rest is down. Once
    it is back, `down` again leaves nothing."""
    record = cluster.record()
    with net.unplugged("studio"):
        done = cluster.pdctl("down", cluster.topology, check=False)
        assert done.returncode == 1, done.stdout + done.stderr
        assert 'host "studio"' in done.stderr
        assert [p for p in processes(cluster.far, record) if "--host gpu1" in p] == []
    cluster.pdctl("down", cluster.topology)
    cluster.assert_nothing_left(record)
