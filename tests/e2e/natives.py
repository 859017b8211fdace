"""What a pair must do whose KV cache travels through NIXL: by its engine's own or pdctl's."""

from __future__ import annotations

import ipaddress
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from e2e.cluster import text_of
from e2e.faults import Request
from e2e.mixed import Mixed
from tiny import digits

LENGTHS = (51, 65, 129, 193, 700)
TOKENS = 12
BACK_S = 150.0


def needs_nixl(python: Path) -> pytest.MarkDecorator:
    found = list(python.parents[1].glob("lib/python*/site-packages/nixl"))
    return pytest.mark.skipif(not found, reason=f"no nixl in {python.parents[1]}")


def check_answers(cluster: Mixed, path: str, alone: str, tokens: int) -> None:
    """Chat and completion, streamed and whole, are what another replica computes alone."""
    fields = {"max_tokens": TOKENS}
    prompt = digits(tokens, 3)
    salted = {**fields, "cache_salt": f"{path} {tokens}"}
    expected = cluster.completion(prompt, alone, **fields, cache_salt="alone").json()
    answer = cluster.completion(prompt, path, **salted)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-pdctl-path"] == path
    text = answer.json()["choices"][0]["text"]
    assert text.strip() == expected["choices"][0]["text"].strip()
    streamed = cluster.stream("/v1/completions", {"prompt": prompt, **salted}, path)
    assert text_of(streamed) == text
    said = cluster.chat(prompt, alone, **fields, cache_salt="alone").json()
    chat = cluster.chat(prompt, path, **salted)
    assert chat.status_code == 200, chat.text
    content = chat.json()["choices"][0]["message"]["content"]
    assert content.strip() == said["choices"][0]["message"]["content"].strip()
    messages = [{"role": "user", "content": prompt}]
    events = cluster.stream("/v1/chat/completions", {"messages": messages, **salted}, path)
    assert text_of(events) == content


def check_counted(cluster: Mixed, path: str) -> None:
    """Each handoff, and its tokens; what the engine's own can't tell is null, in `ps` too."""
    pair = path.split(">")
    before = cluster.pair(*pair)
    assert cluster.completion(digits(100, 5), path, max_tokens=2).status_code == 200
    after = cluster.pair(*pair)
    assert after["transport"] == "native"
    assert after["handoffs_completed"] - before["handoffs_completed"] == 1, (before, after)
    assert after["imported_tokens"] - before["imported_tokens"] == 100, (before, after)
    assert after["host_bytes"] > before["host_bytes"]
    assert after["reused_pages"] is None
    shown = {row["name"]: row for row in cluster.ps()["replicas"]}
    assert [shown[name]["waiters"] for name in pair] == [None, None]
    table = cluster.pdctl("ps", cluster.topology).stdout
    assert any(line.split()[:2] == [path, "native"] for line in table.splitlines())


def check_leaving(cluster: Mixed, path: str, clients: int) -> None:
    """U5, U34: wherever they leave, both ends are free soon, and live on: SGLang's would end over
    a page that is nobody's."""
    lives = pids(cluster, path)
    begun = [threading.Thread(target=_leave, args=(cluster, path, n)) for n in range(clients)]
    for one in begun:
        one.start()
    for one in begun:
        one.join()
    cluster.wait("nothing in flight", cluster.idle, 15)
    assert pids(cluster, path) == lives


def pids(cluster: Mixed, path: str) -> list[int]:
    return [cluster.replica(name)["pid"] for name in path.split(">")]


def _leave(cluster: Mixed, path: str, seed: int) -> None:
    chance = random.Random(seed)
    asked: dict[str, Any] = {
        "model": cluster.model,
        "prompt": digits(chance.choice((65, 300, 700, 1500)), seed),
        "max_tokens": 300,
        "stream": seed % 2 == 0,
    }
    host, _, port = cluster.bind.partition(":")
    body = msgspec.json.encode(asked)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nx-pdctl-path: {path}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + body)
        # whenever that is: any stage will do
        time.sleep(chance.uniform(0.0, 1.5))


def check_killed(cluster: Mixed, path: str, alone: str, killed: str) -> None:
    """U14, U35: the other end lives on, and hands over again with the process that comes instead.
    An answer whose prompt has been handed over is whole without its prefill replica."""
    ends = path.split(">")
    other = next(name for name in ends if name != killed)
    lives = cluster.replica(other)["pid"]
    answering = Request(cluster, digits(130, 6), path=path, max_tokens=400, ignore_eos=True)
    assert answering.begun.wait(60)
    killed_s = time.monotonic()
    cluster.kill(killed)
    assert cluster.completion(digits(65, 2), path, max_tokens=2).status_code in (502, 503)
    if killed == ends[0]:
        answering.good()
    else:
        answering.told(killed, since_s=killed_s)
    cluster.wait("the pair is back", cluster.ready, BACK_S)
    check_answers(cluster, path, alone, 193)
    assert cluster.replica(other)["pid"] == lives
    assert cluster.replica(killed)["restarts"] >= 1


def check_loopback(cluster: Mixed, *replicas: str) -> None:
    """R60: what an engine's own handoff and UCX listen on asks nobody who he is."""
    for name in replicas:
        found = [
            connection.laddr.ip
            for process in cluster.processes(name)
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert found
        assert all(ipaddress.ip_address(ip).is_loopback for ip in found), (name, found)
