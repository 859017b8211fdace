from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest
from runtime.clusters import until

from pdctl.engines.channel import REPLICA_ENV, RUN_ENV
from pdctl.engines.interface import Command
from pdctl.runtime.hosts.interface import Mark
from pdctl.runtime.machine import process

pytestmark = pytest.mark.anyio

Start = Callable[..., tuple[Mark, "subprocess.Popen[bytes]"]]

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('deaf', flush=True); time.sleep(600)"
)
SESSION_LEAVER = (
    "import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True); "
    "subprocess.Popen(['sleep', '600']); print('forked', flush=True); time.sleep(600)"
)


NAMELESS = (
    "import subprocess, time; child = subprocess.Popen(['/bin/sleep', '600'], env={}); "
    "print(child.pid, flush=True); time.sleep(600)"
)
"""Its child shows no environment, like one that has written over it."""


@pytest.fixture
def run() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def start(tmp_path: Path, run: str) -> Iterator[Start]:
    """Starts marked processes; whatever is left of them at the end is killed and reaped."""
    children: list[subprocess.Popen[bytes]] = []

    def begin(*argv: str, replica: str = "p0") -> tuple[Mark, subprocess.Popen[bytes]]:
        command = Command(argv=argv, env={RUN_ENV: run, REPLICA_ENV: replica})
        child = process.start(command, log=tmp_path / "logs" / f"{replica}.log")
        children.append(child)
        return process.mark_of(child.pid) or Mark(pid=child.pid, birth="gone"), child

    yield begin
    for mark in process.marked(run):
        with contextlib.suppress(ProcessLookupError):
            os.kill(mark.pid, signal.SIGKILL)
    for child in children:
        child.kill()
        child.wait(10)


async def test_a_mark_is_the_pid_and_its_birth(start: Start) -> None:
    """The same pid with another birth is another process, and is never signalled."""
    mark, child = start("sleep", "600")
    stranger = Mark(pid=mark.pid, birth="another")
    assert process.is_alive(mark)
    assert not process.is_alive(stranger)
    process.signal_group(stranger, signal.SIGKILL)
    assert await process.stop(stranger, grace_s=0.1) == []
    assert child.poll() is None


async def test_a_zombie_is_not_alive(start: Start) -> None:
    """A process that ended but was not waited for counts as gone."""
    mark, _ = start("sleep", "600")
    os.kill(mark.pid, signal.SIGKILL)
    with anyio.fail_after(10):
        await process.wait_exit(mark)
    assert not process.is_alive(mark)
    assert process.mark_of(mark.pid) is None


async def test_waiting_ends_with_the_process_of_another_parent(start: Start, run: str) -> None:
    """An adopted process, no child of ours, is awaited as well."""
    mark, _ = start(sys.executable, "-c", SESSION_LEAVER)
    await until("it forked", lambda: len(process.marked(run)) == 3)
    grandchild = next(m for m in process.marked(run) if m != mark)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(process.wait_exit, grandchild)
        os.kill(grandchild.pid, signal.SIGKILL)
    assert not process.is_alive(grandchild)


async def test_a_process_that_obeys_is_not_killed(start: Start) -> None:
    """SIGTERM comes first, and is enough where it is obeyed."""
    mark, child = start("sleep", "600")
    assert await process.stop(mark, grace_s=10) == []
    assert child.wait(5) == -signal.SIGTERM


async def test_a_process_that_ignores_sigterm_is_killed(start: Start, tmp_path: Path) -> None:
    """R23: after the grace comes SIGKILL."""
    mark, child = start(sys.executable, "-c", STUBBORN)
    log = tmp_path / "logs" / "p0.log"
    await until("it is deaf", lambda: b"deaf" in log.read_bytes())
    assert await process.stop(mark, grace_s=0.2) == []
    assert child.wait(5) == -signal.SIGKILL


async def test_children_in_sessions_of_their_own_are_ended_too(start: Start, run: str) -> None:
    """U26: what a replica forked is found by its marks, also outside its group."""
    mark, _ = start(sys.executable, "-c", SESSION_LEAVER)
    await until("it forked", lambda: len(process.marked(run)) == 3)
    assert await process.stop(mark, grace_s=5, run=run, replica="p0") == []
    assert process.marked(run) == []


@pytest.mark.parametrize("killed", [False, True])
async def test_children_without_an_environment_are_ended_too(
    start: Start, run: str, tmp_path: Path, killed: bool
) -> None:
    """U26: vLLM's write over theirs; also where the one that started them was killed."""
    mark, parent = start(sys.executable, "-c", NAMELESS)
    log = tmp_path / "logs" / "p0.log"
    await until("it has a child", lambda: log.read_bytes().endswith(b"\n"))
    child = process.mark_of(int(log.read_text()))
    assert child is not None
    assert set(process.marked(run)) == {mark, child}
    if killed:
        os.kill(mark.pid, signal.SIGKILL)
        parent.wait(10)
    assert process.is_alive(child)
    assert await process.stop(mark, grace_s=5, run=run, replica="p0") == []
    assert not process.is_alive(child)


async def test_another_replica_of_the_same_run_is_left_alone(start: Start, run: str) -> None:
    """Stopping one replica ends nothing of its neighbour."""
    mark, _ = start("sleep", "600")
    other, _ = start("sleep", "600", replica="d0")
    await process.stop(mark, grace_s=5, run=run, replica="p0")
    assert process.marked(run) == [other]


async def test_a_cancelled_stop_still_stops(start: Start, run: str) -> None:
    """R17: who is cancelled while stopping a process leaves nothing half stopped."""
    mark, _ = start("sleep", "600")
    with anyio.CancelScope() as scope:
        scope.cancel()
        await process.stop(mark, grace_s=5, run=run)
    assert not process.is_alive(mark)


async def test_output_is_appended_to_a_private_log(start: Start, tmp_path: Path) -> None:
    """Both streams go to one 0600 file, which a second start adds to; stdin is empty."""
    for _ in range(2):
        mark, child = start("sh", "-c", "echo out; echo err >&2; cat")
        with anyio.fail_after(10):
            await process.wait_exit(mark)
        assert child.wait(5) == 0
    log = tmp_path / "logs" / "p0.log"
    assert sorted(log.read_text().split()) == ["err", "err", "out", "out"]
    assert log.stat().st_mode & 0o777 == 0o600


async def test_a_process_leads_a_session_of_its_own(start: Start) -> None:
    """A closed terminal reaches nothing that was started."""
    mark, _ = start("sleep", "600")
    assert os.getsid(mark.pid) == mark.pid


async def test_what_cannot_be_executed_raises(start: Start) -> None:
    """A missing program is an OSError at once, not a process that dies."""
    with pytest.raises(FileNotFoundError):
        start("/no/such/program")
