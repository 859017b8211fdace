"""Runs pdctl as a user types it, on a cluster of doubles with a state directory of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
from runtime.clusters import topology_text

from pdctl.runtime.cluster.state import ClusterRecord, StateDir
from pdctl.runtime.machine import process

PDCTL = Path(sys.executable).with_name("pdctl")
TIMEOUT_S = 180
"""Far beyond anything that passes; only a failing test waits for it."""


class Shell:
    """Runs pdctl with a state directory of its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.name = f"t-{uuid.uuid4().hex[:8]}"
        self.file = folder / "topology.toml"
        self.env = {**os.environ, "XDG_STATE_HOME": str(folder / "xdg"), "NO_COLOR": "1"}
        self.state = StateDir(folder / "xdg" / "pdctl" / self.name)
        self.records: list[ClusterRecord] = []

    def write(self, roles: dict[str, str] | None = None, **faults: str) -> None:
        """The topology's file; p0 and d0 where `roles` says nothing."""
        text = topology_text(
            self.folder, name=self.name, faults=faults, model=self.model, roles=roles
        )
        self.file.write_text(text)

    def edit(self, old: str, new: str) -> None:
        text = self.file.read_text()
        assert old in text
        self.file.write_text(text.replace(old, new))

    def ps(self) -> dict[str, Any]:
        return dict(json.loads(self("ps", self.name, "--json")[0]))

    def replica(self, name: str) -> dict[str, Any]:
        return next(r for r in self.ps()["replicas"] if r["name"] == name)

    def ask(self, prompt: str = "hi", path: str | None = None) -> httpx.Response:
        """One completion through the router."""
        record = self.state.read()
        assert record is not None
        return httpx.post(
            f"{record.url}/v1/completions",
            json={"model": "tiny", "prompt": prompt, "max_tokens": 1},
            headers={"x-pdctl-path": path} if path else {},
            timeout=TIMEOUT_S,
        )

    @contextmanager
    def held(self, path: str | None = None) -> Iterator[Future[httpx.Response]]:
        """A request that runs until the block ends (its answer is the future's), or is cut."""
        gate = self.folder / f"gate-{uuid.uuid4().hex[:6]}"
        gate.touch()
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(self.ask, f"hold {gate}", path)
            try:
                self.until(
                    "it runs", lambda: any(r["routed_active"] for r in self.ps()["replicas"])
                )
                yield answer
            finally:
                gate.unlink(missing_ok=True)

    def begin(self, *words: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(PDCTL), *map(str, words)],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: object, code: int = 0) -> tuple[str, str]:
        with self.begin(*words) as running:
            out, err = running.communicate(timeout=TIMEOUT_S)
        assert running.returncode == code, (words, out, err)
        return out, err

    def succeeds(self, *words: object) -> bool:
        with self.begin(*words) as running:
            running.communicate(timeout=TIMEOUT_S)
        return running.returncode == 0

    def record(self) -> ClusterRecord:
        record = self.state.read()
        assert record is not None
        self.records.append(record)
        return record

    def _is_busy(self) -> bool:
        return any(replica["routed_active"] for replica in self.ps()["replicas"])

    def until(self, what: str, condition: Callable[[], object]) -> None:
        until_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < until_s, f"still not: {what}"
            time.sleep(0.05)

    def started(self) -> bool:
        """Whether a replica has written to its log."""
        log = self.state.log("p0")
        return log.exists() and log.stat().st_size > 0

    def assert_down(self) -> None:
        for record in self.records:
            assert process.marked(record.run) == []
            assert not Path(record.socket_dir).exists()
        left = [p.name for p in self.state.path.iterdir()] if self.state.path.exists() else []
        assert set(left) <= {"logs", "costs.json"}
