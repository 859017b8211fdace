"""Processes of others on the GPUs that a cluster computes on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection, Iterable
from functools import partial

import anyio
import msgspec
import psutil

from pdctl.runtime.bench.status import Status

QUERY_S = 5.0
"""nvidia-smi hangs where a driver is broken."""
QUERY = ("nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader")


class Stranger(msgspec.Struct, frozen=True):
    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


class GpuWatch:
    """Asks this machine's driver; GPUs of other hosts are not watched.

    Judges only where a process of the cluster is on the driver's list: elsewhere the cluster
    does not compute on these GPUs, or the list has the pids of another namespace. After one
    failure (no nvidia-smi, no answer in QUERY_S) it asks no more.
    """

    def __init__(
        self,
        local_hosts: Collection[str],
        *,
        query: Callable[[], dict[int, str]] | None = None,
        family: Callable[[Iterable[int]], frozenset[int]] | None = None,
    ) -> None:
        self._local_hosts = local_hosts
        self._query = query or compute_processes
        self._family = family or with_descendants
        self._asks = True

    async def strangers(self, status: Status) -> frozenset[Stranger]:
        """Who else is there at this moment. `status` tells the replicas' pids."""
        if not self._asks:
            return frozenset()
        try:
            found = await anyio.to_thread.run_sync(self._query, abandon_on_cancel=True)
        except (OSError, subprocess.SubprocessError):
            self._asks = False
            return frozenset()
        roots = [
            entry["pid"]
            for entry in status.replicas.values()
            if entry.get("host") in self._local_hosts and isinstance(entry.get("pid"), int)
        ]
        ours = await anyio.to_thread.run_sync(partial(self._family, roots))
        if not ours & found.keys():
            return frozenset()
        return frozenset(Stranger(pid, name) for pid, name in found.items() if pid not in ours)


def compute_processes() -> dict[int, str]:
    """Names by pid; OSError or SubprocessError where the driver's tool does not answer."""
    asked = subprocess.run(
        QUERY, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=QUERY_S, check=True
    )
    return parse_processes(asked.stdout)


def parse_processes(text: str) -> dict[int, str]:
    """From nvidia-smi's CSV; lines without a pid are left out."""
    found: dict[int, str] = {}
    for line in text.splitlines():
        pid, _, name = line.partition(",")
        if pid.strip().isdigit():
            found[int(pid)] = name.strip() or "a process"
    return found


def with_descendants(pids: Iterable[int]) -> frozenset[int]:
    """Engines compute in processes of their own, below the one that was launched."""
    found: set[int] = set()
    for pid in pids:
        found.add(pid)
        try:
            found.update(child.pid for child in psutil.Process(pid).children(recursive=True))
        except psutil.Error:
            continue
    return frozenset(found)
