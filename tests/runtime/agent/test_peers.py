"""Who may attach under a replica's name."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from pdctl.engines.channel import Attach
from pdctl.runtime.agent.peers import stranger
from pdctl.runtime.hosts.interface import Mark
from pdctl.runtime.machine import process


@pytest.fixture
def engine() -> Iterator[Mark]:
    """A process that leads its session, as everything that an agent starts."""
    with subprocess.Popen(("sleep", "600"), start_new_session=True) as started:
        mark = process.mark_of(started.pid)
        assert mark is not None
        yield mark
        started.kill()


def attach(pid: int) -> Attach:
    return Attach(kind="engine", name="p0", pid=pid, version="1")


def test_what_was_started_may_attach(engine: Mark) -> None:
    """By the kernel's pid where it tells one, else by what the peer says."""
    for pid in (engine.pid, None):
        assert stranger(attach(engine.pid), engine, uid=os.getuid(), pid=pid) is None


def test_the_kernels_pid_counts_more_than_the_peers_own(engine: Mark) -> None:
    found = stranger(attach(engine.pid), engine, uid=os.getuid(), pid=os.getpid())
    assert found == f"process {engine.pid} is not the one that runs as p0"


def test_others_are_told_why_not(engine: Mark) -> None:
    """Another user's, one that has gone, and any while nothing runs under that name."""
    uid = os.getuid()
    assert stranger(attach(engine.pid), engine, uid=uid + 1, pid=None) == "another user's process"
    with subprocess.Popen("true") as ended:
        pass
    gone = stranger(attach(ended.pid), engine, uid=uid, pid=ended.pid)
    assert gone == "its process can't be seen"
    assert "is not the one" in (stranger(attach(engine.pid), None, uid=uid, pid=None) or "")
