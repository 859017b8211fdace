"""An engine's end of the agent's socket."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engines.replicas import KEY
from engines.stub_agent import WAIT_S, StubAgent

from pdctl.engines.attachment import Attachment
from pdctl.engines.channel import Assignment, Effective, Failed, HandoffSettings, Ready, encode
from pdctl.errors import LaunchError, UsageError
from pdctl.handoff.counters import Counters
from pdctl.topology.contract import Attention, Contract, Positions
from pdctl.topology.model import ComputeDtype, Dtype, Engine, OnFailure, Role

ATTENTION = Attention(kind="full", layers=4, kv_heads=2, head_dim=64)
POSITIONS = Positions(rope_theta=1e5, max_positions=2048, context_length=2048)
ASSIGNMENT = Assignment(
    cluster="test",
    replica="d0",
    role=Role.DECODE,
    key=KEY,
    contract=Contract(
        weights="w",
        tokenizer="t",
        chat_template="c",
        attention=ATTENTION,
        positions=POSITIONS,
        dtype=Dtype.FLOAT16,
    ),
    compute_dtype=ComputeDtype.FLOAT16,
    data_host="127.0.0.1",
    data_port=None,
    handoff=HandoffSettings(
        timeout_s=60.0, on_failure=OnFailure.ERROR, buffer_bytes=1 << 20, encrypt=False
    ),
)
READY = Ready(
    engine=Engine.MLX,
    engine_version="0.32.2",
    effective=Effective(
        attention=ATTENTION, positions=POSITIONS, compute_dtype=ComputeDtype.FLOAT16
    ),
    http_port=1,
    data_port=None,
)


@pytest.fixture
def agent() -> Iterator[StubAgent]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        made = StubAgent(Path(folder) / "a.sock", ASSIGNMENT)
        yield made
        made.go_away()


@pytest.fixture
def superseded() -> threading.Event:
    return threading.Event()


@pytest.fixture
def attachment(agent: StubAgent, superseded: threading.Event) -> Iterator[Attachment]:
    made = Attachment(
        str(agent.path),
        "d0",
        counters=lambda: Counters(imported_tokens=5),
        superseded=superseded.set,
    )
    assert made.open(WAIT_S) == ASSIGNMENT
    yield made
    made.close()


def test_ready_failures_and_reports_reach_the_agent(
    agent: StubAgent, attachment: Attachment
) -> None:
    """A Poll is answered with the counters of that moment."""
    attachment.ready(READY)
    attachment.failed(Failed(room=1, leg="decode", cause="tokens", detail="differ"))
    agent.wait("failures")
    assert agent.ready == READY
    assert agent.counters().imported_tokens == 5


def test_an_agent_that_comes_back_gets_ready_and_what_it_missed(
    agent: StubAgent, attachment: Attachment
) -> None:
    """A restarted agent learns everything again, without the engine's restart."""
    attachment.ready(READY)
    agent.wait("ready")
    agent.go_away()
    attachment.failed(Failed(room=2, leg="decode", cause="expired", detail="late"))
    agent.listen()
    agent.wait("failures")
    assert agent.ready == READY
    assert agent.attached == 2


def test_another_assignment_ends_the_engine(
    agent: StubAgent, attachment: Attachment, superseded: threading.Event
) -> None:
    """What was loaded no longer fits: serving on would mix two clusters."""
    agent.go_away()
    agent.assignment = Assignment(**{**_fields(ASSIGNMENT), "key": bytes(32)})
    agent.listen()
    assert superseded.wait(WAIT_S)


def test_no_agent_is_a_launch_error(tmp_path: Path) -> None:
    """Bounded, and it names the socket."""
    lonely = Attachment(str(tmp_path / "none"), "d0", counters=Counters)
    with pytest.raises(LaunchError, match="none"):
        lonely.open(1.0)


def test_an_engine_started_by_hand_says_how_it_is_started() -> None:
    """Nothing is opened without an agent."""
    with pytest.raises(UsageError, match="PDCTL_SOCKET"):
        Attachment.from_environment({}, counters=Counters)


def _fields(struct: Assignment) -> dict[str, object]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_a_frozen_agent_holds_up_no_handoff(tmp_path: Path) -> None:
    """It accepted and reads no more: its socket fills, and failures are kept for the next."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as frozen:
        path = f"{folder}/a.sock"
        frozen.bind(path)
        frozen.listen()
        made = Attachment(path, "d0", counters=Counters)
        with ThreadPoolExecutor(1) as thread:
            opened = thread.submit(made.open, WAIT_S)
            peer, _ = frozen.accept()
            with peer:
                peer.sendall(encode(ASSIGNMENT))
                assert opened.result(WAIT_S) == ASSIGNMENT
                failure = Failed(room=1, leg="decode", cause="tokens", detail="x" * 50_000)
                told = thread.submit(lambda: [made.failed(failure) for _ in range(40)])
                assert len(told.result(WAIT_S)) == 40
                made.close()
