"""Real MLX server processes, each with a stand-in for the agent that it attaches to."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from types import TracebackType
from typing import Any

from engines.stub_agent import WAIT_S, StubAgent

from pdctl.engines.channel import Assignment, HandoffSettings
from pdctl.engines.interface import EngineSpec, Leg
from pdctl.engines.mlx.options import option_arguments
from pdctl.engines.mlx.spec import MlxSpec
from pdctl.handoff.counters import Counters
from pdctl.handoff.store.interface import StoreSeat
from pdctl.handoff.ticket import mint
from pdctl.topology.checkpoint import read_checkpoint
from pdctl.topology.contract import Contract
from pdctl.topology.fingerprint import fingerprint, make_contract
from pdctl.topology.model import ComputeDtype, Dtype, OnFailure, Role

PYTHON = os.environ.get("PDCTL_TEST_MLX_PYTHON", sys.executable)
SPEC = MlxSpec()
KEY = bytes(range(32))
OPENBLAS = "/usr/lib/x86_64-linux-gnu/libopenblas.so.0"


def contract_of(model_dir: Path, context_length: int = 2048) -> Contract:
    checkpoint, problems = read_checkpoint(model_dir)
    assert checkpoint is not None, problems
    content = fingerprint(model_dir, checkpoint)
    return make_contract(checkpoint, content, dtype=Dtype.FLOAT16, context_length=context_length)


class Process:
    """One replica's server process and its agent. Use as a context."""

    spec: EngineSpec = SPEC
    module = "pdctl.engines.mlx.server"
    ready_s = WAIT_S

    def __init__(
        self,
        folder: Path,
        name: str,
        role: Role,
        model_dir: Path,
        contract: Contract,
        *,
        compute: ComputeDtype = ComputeDtype.FLOAT32,
        buffer_bytes: int = 512 << 20,
        timeout_s: float = 60.0,
        on_failure: OnFailure = OnFailure.ERROR,
        store: str | None = None,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.name, self.role, self.contract = name, role, contract
        self._env = env or {}
        self._model_dir, self._options = model_dir, options
        self._log_path = folder / f"{name}.log"
        assignment = Assignment(
            cluster="test",
            replica=name,
            role=role,
            key=KEY,
            contract=contract,
            compute_dtype=compute,
            data_host="127.0.0.1",
            data_port=None,
            handoff=HandoffSettings(
                timeout_s=timeout_s,
                on_failure=on_failure,
                buffer_bytes=buffer_bytes,
                encrypt=False,
            ),
            store=StoreSeat(socket=store) if store else None,
        )
        self.agent = StubAgent(folder / f"{name}.sock", assignment)

    def __enter__(self) -> Process:
        argv = [PYTHON, "-m", self.module, "--model", str(self._model_dir)]
        argv += ["--host", "127.0.0.1", "--port", "0", *option_arguments(self._options)]
        env = {
            **os.environ,
            "PDCTL_SOCKET": str(self.agent.path),
            "PDCTL_REPLICA": self.name,
            **self._env,
        }
        if Path(OPENBLAS).exists():
            env |= {"LD_PRELOAD": OPENBLAS, "OPENBLAS_NUM_THREADS": "1"}
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
        self.await_ready()
        return self

    def await_ready(self) -> None:
        until = time.monotonic() + self.ready_s
        with self.agent._changed:
            while self.agent.ready is None:
                assert self.process.poll() is None, self.log[-6000:]
                assert time.monotonic() < until, self.log[-6000:]
                self.agent._changed.wait(0.2)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.agent.go_away()

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    @property
    def http_port(self) -> int:
        assert self.agent.ready is not None
        return self.agent.ready.http_port

    @property
    def data_port(self) -> int:
        """Where a prefill replica listens."""
        assert self.agent.ready is not None
        assert self.agent.ready.data_port is not None
        return self.agent.ready.data_port

    def counters(self) -> Counters:
        return self.agent.counters()

    def open(self, path: str, body: dict[str, Any]) -> tuple[HTTPConnection, HTTPResponse]:
        connection = self.send(path, body)
        return connection, connection.getresponse()

    def send(self, path: str, body: dict[str, Any]) -> HTTPConnection:
        connection = HTTPConnection("127.0.0.1", self.http_port, timeout=WAIT_S)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        return connection

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        connection, response = self.open(path, body)
        try:
            return response.status, json.loads(response.read() or b"{}")
        finally:
            connection.close()

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        connection, response = self.open(path, {**body, "stream": True})
        try:
            assert response.status == 200, response.read()
            return list(read_events(response))
        finally:
            connection.close()


def read_events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


def text_of(answer: dict[str, Any]) -> str:
    """The text of a whole answer or of one event, chat or completion."""
    if not answer.get("choices"):
        return ""
    choice = answer["choices"][0]
    part = choice.get("message") or choice.get("delta")
    return (part.get("content") or "") if part is not None else choice.get("text", "")


def leg_between(
    prefill: str, decode: str, data_port: int, contract: Contract, timeout_s: float = 30.0
) -> Leg:
    """What the router would tell both ends of one handoff."""
    room = random.getrandbits(62)
    return Leg(
        room=room,
        ticket=mint(KEY, room, prefill, decode, contract.digest, time.time() + 300),
        prefill=prefill,
        decode=decode,
        sender=f"127.0.0.1:{data_port}",
        timeout_s=timeout_s,
    )


class Pair:
    """A prefill and a decode process; sends both legs as the router does."""

    def __init__(self, prefill: Process, decode: Process) -> None:
        self.prefill, self.decode = prefill, decode

    def leg(self, timeout_s: float = 30.0) -> Leg:
        prefill, decode = self.prefill, self.decode
        return leg_between(
            prefill.name, decode.name, prefill.data_port, prefill.contract, timeout_s
        )

    def post(
        self, path: str, body: dict[str, Any], leg: Leg | None = None
    ) -> tuple[tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]:
        """Both legs at once; (status, answer) of prefill and of decode."""
        leg = leg or self.leg()
        prefill = self.prefill.send(path, self.prefill.spec.prefill_body(body, leg))
        decode = self.decode.post(path, self.decode.spec.decode_body(body, leg))
        response = prefill.getresponse()
        answer = response.status, json.loads(response.read())
        prefill.close()
        return answer, decode

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The decode leg streamed, after prefill has succeeded too."""
        leg = self.leg()
        prefill = self.prefill.send(path, self.prefill.spec.prefill_body(body, leg))
        found = self.decode.events(path, self.decode.spec.decode_body(body, leg))
        response = prefill.getresponse()
        assert response.status == 200, response.read()
        prefill.close()
        return found
