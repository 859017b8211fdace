"""Drives a whole cluster through the commands that a user types."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
from ports import free_port

from pdctl.runtime.cluster.state import ClusterRecord, StateDir, handoff_key

PDCTL = Path(sys.executable).with_name("pdctl")
OPENBLAS = Path("/usr/lib/x86_64-linux-gnu/libopenblas.so.0")
UP_TIMEOUT_S = 240
GAUGES = ("handoffs_active", "buffer_bytes_used", "waiters", "requests_active")
ENGINE_PYTHON = os.environ.get("PDCTL_TEST_MLX_PYTHON", sys.executable)


def engine_env() -> dict[str, str]:
    """Environment that makes MLX quick on a Linux CPU, where the machine has OpenBLAS."""
    if not OPENBLAS.exists():
        return {}
    return {"LD_PRELOAD": str(OPENBLAS), "OPENBLAS_NUM_THREADS": "1"}


def topology_text(
    name: str,
    model_dir: Path,
    *,
    bind: str,
    model: str = "tiny",
    roles: dict[str, str] | None = None,
    compute_dtype: str = "float32",
    context_length: int = 2048,
    handoff: str = "",
) -> str:
    """A topology of MLX replicas on this machine; `roles` maps replica to role."""
    roles = roles or {"p0": "prefill", "d0": "decode", "o0": "both"}
    head = head_text(name, bind=bind, model=model, context_length=context_length, handoff=handoff)
    env = ", ".join(f'{k} = "{v}"' for k, v in engine_env().items())
    host = f"""
[hosts.local]
python = "{ENGINE_PYTHON}"
env = {{ {env} }}
"""
    replicas = [
        f"""
[[replicas]]
name = "{replica}"
engine = "mlx"
role = "{role}"
model = "{model_dir}"
compute_dtype = "{compute_dtype}"
"""
        for replica, role in roles.items()
    ]
    return head + host + "".join(replicas)


def head_text(
    name: str,
    *,
    bind: str,
    model: str = "tiny",
    context_length: int = 2048,
    handoff: str = "",
) -> str:
    """A topology up to its hosts and replicas; `handoff` is more lines of that section, and
    sections after it."""
    return f"""
schema = 1
name = "{name}"
[model]
name = "{model}"
dtype = "float16"
context_length = {context_length}
[router]
bind = "{bind}"
[handoff]
timeout_s = 60.0
{handoff}
"""


class Cluster:
    """One topology, launched with `pdctl up -d`; a context manager that proves `down`."""

    def __init__(self, folder: Path, model_dir: Path, **options: Any) -> None:
        self.name = f"t-{uuid.uuid4().hex[:8]}"
        self.bind = f"127.0.0.1:{free_port()}"
        self.url = f"http://{self.bind}"
        self.model = options.get("model", "tiny")
        self.state = folder / "state"
        self.state_dir = StateDir(self.state / "pdctl" / self.name)
        self.topology = folder / "topology.toml"
        self.topology.write_text(topology_text(self.name, model_dir, bind=self.bind, **options))
        self.env = {**os.environ, "XDG_STATE_HOME": str(self.state), "NO_COLOR": "1"}
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def __enter__(self) -> Cluster:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        done = self.pdctl("down", self.topology, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        left = list(self.leftovers())
        assert left == []

    def pdctl(self, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        words = [str(PDCTL), *(str(a) for a in arguments)]
        done = subprocess.run(
            words, env=self.env, capture_output=True, text=True, timeout=UP_TIMEOUT_S, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"{words} → {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def up(self) -> None:
        self.pdctl("up", self.topology, "--detach", "--wait-timeout", UP_TIMEOUT_S - 20)

    def record(self) -> ClusterRecord:
        """What the launch wrote down."""
        found = self.state_dir.read()
        assert found is not None
        return found

    def key(self) -> bytes:
        """That of its handoffs."""
        return handoff_key(self.state_dir.read_key())

    def ps(self, *, check: bool = True) -> dict[str, Any]:
        return dict(json.loads(self.pdctl("ps", self.topology, "--json", check=check).stdout))

    def status(self) -> dict[str, Any]:
        return dict(self.http.get("/status").json())

    def pair(self, prefill: str = "p0", decode: str = "d0") -> dict[str, Any]:
        for pair in self.status()["pairs"]:
            if (pair["prefill"], pair["decode"]) == (prefill, decode):
                return dict(pair)
        raise AssertionError(f"no pair {prefill}>{decode}")

    def replica(self, name: str) -> dict[str, Any]:
        for replica in self.status()["replicas"]:
            if replica["name"] == name:
                return dict(replica)
        raise AssertionError(f"no replica {name}")

    def completion(self, prompt: str, path: str, **body: Any) -> httpx.Response:
        payload = {"model": self.model, "prompt": prompt, "temperature": 0, **body}
        return self.http.post("/v1/completions", json=payload, headers={"x-pdctl-path": path})

    def chat(self, content: str, path: str, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        payload = {"model": self.model, "messages": messages, "temperature": 0, **body}
        return self.http.post("/v1/chat/completions", json=payload, headers={"x-pdctl-path": path})

    def stream(self, route: str, body: dict[str, Any], path: str) -> list[dict[str, Any]]:
        """All JSON events of one streamed answer; it must end with [DONE]."""
        payload = {"model": self.model, "temperature": 0, "stream": True, **body}
        events = []
        done = False
        with self.http.stream(
            "POST", route, json=payload, headers={"x-pdctl-path": path}
        ) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    events.append(json.loads(line[6:]))
        assert done, "the stream ended without [DONE]"
        return events

    def kill(self, replica: str) -> int:
        """SIGKILL to one replica's process; returns its pid."""
        pid = int(self.replica(replica)["pid"])
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        """Polls until `condition` holds; fails with `what` otherwise."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if condition():
                return
            time.sleep(0.1)
        raise AssertionError(f"after {timeout_s} s still not: {what}")

    def ready(self) -> bool:
        try:
            pairs = self.status()["pairs"]
        except httpx.HTTPError:
            return False
        return all(pair["state"] == "ready" for pair in pairs)

    def in_flight(self) -> int:
        """The sum of everything that a request holds anywhere, gauges of every replica."""
        return sum(r[gauge] or 0 for r in self.status()["replicas"] for gauge in GAUGES)

    def idle(self) -> bool:
        """Nothing in flight anywhere: no handoff, no reserved byte, no waiter, no request."""
        return self.in_flight() == 0

    def leftovers(self) -> Iterator[str]:
        """Processes whose command line names this cluster's folder."""
        done = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            if str(self.topology.parent) in line:
                yield line


def text_of(events: list[dict[str, Any]]) -> str:
    """The whole text of a streamed answer, completion or chat."""
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
