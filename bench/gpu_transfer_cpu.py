"""What threads take of a core, this process's and another's, from /proc (Linux)."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Spent(NamedTuple):
    """Between two looks at one process; seconds of a core."""

    whole_s: float
    """Of all its threads, also of those that ended."""
    main_s: float
    busiest_s: float
    """Of one of the others that lived all the while."""
    passing_s: float
    """Of all that began or ended meanwhile."""


class Used(NamedTuple):
    """Since a process began."""

    main: int
    whole_s: float
    threads_s: dict[int, float]
    """Of those that live."""
    look_s: float = 0.0
    """What this look took of the first thread, where that is the one that looked at itself."""

    def since(self, before: Used) -> Spent:
        lasting = {
            thread: max(0.0, self.threads_s[thread] - before.threads_s[thread])
            for thread in self.threads_s.keys() & before.threads_s.keys()
        }
        if self.main in lasting:
            lasting[self.main] = max(0.0, lasting[self.main] - self.look_s)
        whole_s = self.whole_s - self.look_s - before.whole_s
        passing_s = max(0.0, whole_s - sum(lasting.values()))
        main_s = lasting.pop(self.main, 0.0)
        return Spent(whole_s, main_s, max(lasting.values(), default=0.0), passing_s)


def used(pid: int | None = None) -> Used:
    """Of that process, or of this one, whose first thread asks. A thread that runs while it is
    looked at may have taken some milliseconds more. Where the kernel counts in ticks alone, so
    does this."""
    pid = pid or os.getpid()
    began_s = time.thread_time()
    threads_s = {}
    for path in Path(f"/proc/{pid}/task").iterdir():
        # it may end meanwhile
        with contextlib.suppress(OSError):
            threads_s[int(path.name)] = _thread_s(path)
    if threading.get_native_id() != pid:
        return Used(pid, _whole_s(pid), threads_s)
    # of the thread that asks the kernel knows it to the nanosecond
    threads_s[pid] = time.thread_time()
    return Used(pid, _whole_s(pid), threads_s, threads_s[pid] - began_s)


def _thread_s(task: Path) -> float:
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        return _ticks_s(task)


def _whole_s(pid: int) -> float:
    try:
        # as clock_getcpuclockid(3) makes it
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return _ticks_s(Path(f"/proc/{pid}"))


def _ticks_s(folder: Path) -> float:
    """utime and stime; the name before them may have spaces."""
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S
