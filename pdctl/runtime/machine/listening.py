"""The TCP ports that are listened on, on this machine."""

from __future__ import annotations

import contextlib

import psutil

from pdctl.runtime.hosts.survey import Listener


def listeners() -> list[Listener]:
    """Every one, with its process where the system tells."""
    try:
        found = {
            (c.laddr[1], c.pid)
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.laddr
        }
    except psutil.AccessDenied:
        found = set(_own_listeners())
    return [
        Listener(port=port, pid=pid, since=_started_at(pid)) for port, pid in sorted(found, key=str)
    ]


def _started_at(pid: int | None) -> float | None:
    try:
        return None if pid is None else psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def _own_listeners() -> list[tuple[int, int | None]]:
    """Where the kernel tells only about this user's processes (macOS)."""
    found: list[tuple[int, int | None]] = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += [
                (c.laddr[1], one.pid)
                for c in one.net_connections("tcp")
                if c.status == psutil.CONN_LISTEN and c.laddr
            ]
    return found
