"""Processes of this machine: what one is known by, starting, awaiting and ending them.

Ending is proven, not assumed: SIGTERM to the group, a bounded grace, SIGKILL, then a look for
whatever else of the same run and replica is left (engines fork).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import anyio
import psutil

from pdctl.engines.channel import REPLICA_ENV, RUN_ENV
from pdctl.engines.interface import Command
from pdctl.runtime.hosts.interface import Mark
from pdctl.runtime.machine.boot import boot_id

ACTOR_KEY_ENV = "XOSCAR_AUTH_KEY"
"""Where the actor system reads its key, at every frame. Whoever has it can have an agent run
anything, so nothing that is started here inherits it."""

KILL_WAIT_S = 5.0
"""How long a SIGKILL may take until the process has gone."""


def mark_of(pid: int) -> Mark | None:
    """What the process of that pid is known by; None when there is none, or a zombie."""
    try:
        if sys.platform == "linux":
            birth = _linux_birth(pid)
        else:
            process = psutil.Process(pid)
            gone = process.status() == psutil.STATUS_ZOMBIE
            birth = None if gone else f"{process.create_time():.6f}"
    except (psutil.Error, OSError):
        return None
    return None if birth is None else Mark(pid=pid, birth=birth)


def _linux_birth(pid: int) -> str | None:
    """Boot id and start in clock ticks since boot: a change of the clock changes neither."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    if fields[0] in "ZX":
        return None
    return f"{boot_id()[:8]}-{fields[19]}"


def is_alive(mark: Mark) -> bool:
    return mark_of(mark.pid) == mark


def environment(command: Command, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a command runs with: `base` (None: this process's) without the actor system's key,
    and the command's own."""
    inherited = dict(os.environ if base is None else base)
    inherited.pop(ACTOR_KEY_ENV, None)
    return {**inherited, **command.env}


def start(
    command: Command, *, log: Path, base: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, without stdin, output appended to `log`.

    Args:
        base: environment that `command.env` is added to; None: this process's.

    Raises:
        OSError: it can't be executed.
    """
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            command.argv,
            env=environment(command, base),
            cwd=command.cwd,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def signal_group(mark: Mark, number: int) -> None:
    """Signals the process and the group that it leads; nothing when it has gone."""
    if not is_alive(mark):
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(mark.pid) == mark.pid:
            os.killpg(mark.pid, number)
        else:
            os.kill(mark.pid, number)


def marked(run: str, replica: str | None = None, sessions: Collection[int] = ()) -> list[Mark]:
    """This user's processes that carry the run's mark, and the replica's where one is given.

    A process that has written over its environment, as setproctitle does, belongs to who leads
    its session.

    Args:
        sessions: of leaders that may have ended.
    """
    found, blank = [], []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        if not environment:
            blank.append(process.pid)
        elif environment.get(RUN_ENV) == run and replica in (None, environment.get(REPLICA_ENV)):
            found.append(process.pid)
    leaders = {*found, *sessions}
    found += [pid for pid in blank if _session_of(pid) in leaders]
    return [mark for mark in map(mark_of, found) if mark is not None]


def _session_of(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return None


async def wait_exit(mark: Mark) -> None:
    """Returns once that process has gone, child or not. Unbounded: put a deadline around it."""
    with _exit_descriptor(mark.pid) as descriptor:
        if not is_alive(mark):
            return
        if descriptor is None:
            while is_alive(mark):  # noqa: ASYNC110  this kernel tells nobody but the parent
                await anyio.sleep(0.2)
        else:
            await anyio.wait_readable(descriptor)


@contextlib.contextmanager
def _exit_descriptor(pid: int) -> Iterator[int | None]:
    """A descriptor that turns readable when the process exits: pidfd, or a kqueue."""
    if hasattr(os, "pidfd_open"):
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            yield None
            return
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    elif sys.platform == "darwin":
        queue = select.kqueue()
        try:
            event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
            with contextlib.suppress(OSError):
                queue.control([event], 0)
            yield queue.fileno()
        finally:
            queue.close()
    else:
        yield None


async def stop(
    mark: Mark, *, grace_s: float, run: str | None = None, replica: str | None = None
) -> list[Mark]:
    """Ends a process, its group, and what else of `run` and `replica` it left behind.

    SIGTERM, at most `grace_s`, SIGKILL, at most `KILL_WAIT_S`. Shielded, so that a cancelled
    caller leaves nothing half stopped.

    Returns:
        What is still there: empty but for a process that the kernel can't end.
    """
    left = [mark]
    with anyio.CancelScope(shield=True):
        signal_group(mark, signal.SIGTERM)
        with anyio.move_on_after(grace_s):
            await wait_exit(mark)
        signal_group(mark, signal.SIGKILL)
        if run is not None:
            children = await anyio.to_thread.run_sync(marked, run, replica, (mark.pid,))
            left += [child for child in children if child != mark]
        for child in left[1:]:
            signal_group(child, signal.SIGKILL)
        with anyio.move_on_after(KILL_WAIT_S):
            for process in left:
                await wait_exit(process)
    return [process for process in left if is_alive(process)]
