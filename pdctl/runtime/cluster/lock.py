"""One command at a time changes a cluster; the lock says which.

`flock`: the kernel frees it when its holder dies, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pdctl.errors import ClusterError


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds it; written into the file for whoever comes second."""

    pid: int
    command: str
    since: float
    """Unix seconds."""


@contextlib.contextmanager
def held(path: Path, cluster: str, *, command: str | None = None) -> Iterator[None]:
    """Holds the cluster's lock; the file is removed at the end.

    Raises:
        ClusterError: another command holds it; the message says which, and since when.
    """
    descriptor = _acquired(path, cluster)
    try:
        holder = Holder(pid=os.getpid(), command=command or _command_line(), since=time.time())
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, msgspec.json.encode(holder), 0)
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        os.close(descriptor)


def _acquired(path: Path, cluster: str) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(descriptor, path):
                return descriptor
        except BlockingIOError:
            held_by = os.pread(descriptor, 4096, 0)
            os.close(descriptor)
            raise _busy(cluster, held_by) from None
        os.close(descriptor)


def _is_same(descriptor: int, path: Path) -> bool:
    """False when the last holder removed the file between our open and our lock."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _busy(cluster: str, content: bytes) -> ClusterError:
    try:
        holder = msgspec.json.decode(content, type=Holder)
    except msgspec.MsgspecError:
        return ClusterError(f'cluster "{cluster}" is being changed by another command')
    since = time.strftime("%H:%M:%S", time.localtime(holder.since))
    return ClusterError(
        f'cluster "{cluster}" is being changed by "{holder.command}" '
        f"(pid {holder.pid}, since {since})",
        hint="wait for it, or interrupt it",
    )


def _command_line() -> str:
    return " ".join(["pdctl", *sys.argv[1:]])
